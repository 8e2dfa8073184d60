"""The enumerations of PopART, as far as scripts of data-parallel training name them."""

from __future__ import annotations

from enum import Enum, IntEnum

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "AdamMode",
    "AdaptiveMode",
    "AnchorReturnTypeId",
    "BatchSerializationBatchSchedule",
    "BatchSerializationMethod",
    "BatchSerializationTransformContext",
    "DataType",
    "DeviceConnectionType",
    "DeviceSelectionCriterion",
    "DeviceType",
    "DotCheck",
    "ExecutionPhaseIOSchedule",
    "ExecutionPhaseSchedule",
    "Instrumentation",
    "IrSerializationFormat",
    "MeanReductionStrategy",
    "MergeVarUpdateType",
    "PatternsLevel",
    "RecomputationType",
    "RecomputeType",
    "ReductionType",
    "ReplicatedTensorSharding",
    "SGDAccumulatorAndMomentum",
    "SubgraphCopyingStrategy",
    "SyncPattern",
    "SyntheticDataMode",
    "TensorStorage",
    "TileSet",
    "VirtualGraphMode",
    "WeightDecayMode",
]


class AnchorReturnTypeId(IntEnum):
    """Which values of an anchor come back to the host."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3


class ReductionType(Enum):
    """How values of samples, replicas or micro-batches become one."""

    Sum = "Sum"
    Mean = "Mean"
    NoReduction = "NoReduction"


class VirtualGraphMode(Enum):
    """Who distributes the graph over IPUs; without effect on the software device."""

    Off = "Off"
    Manual = "Manual"
    Auto = "Auto"
    ExecutionPhases = "ExecutionPhases"


class SyntheticDataMode(Enum):
    """Whether inputs come from the host, or are made on the device."""

    Off = "Off"
    Zeros = "Zeros"
    RandomNormal = "RandomNormal"


class MergeVarUpdateType(IntEnum):
    """Which weights are updated together; without effect on the software device."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class RecomputationType(Enum):
    """What of the forward pass is computed again; without effect on the software device."""

    NoRecompute = "NoRecompute"
    Standard = "Standard"
    NormOnly = "NormOnly"
    Pipeline = "Pipeline"
    RecomputeAll = "RecomputeAll"


class AccumulateOuterFragmentSchedule(Enum):
    """Order of what happens once per optimizer step; without effect on the software device."""

    Scheduler = "Scheduler"
    Serial = "Serial"
    OverlapCycleOptimized = "OverlapCycleOptimized"
    OverlapMemoryOptimized = "OverlapMemoryOptimized"


class AdamMode(Enum):
    """Which member of Adam's family."""

    Adam = "Adam"
    AdamNoBias = "AdamNoBias"
    AdaMax = "AdaMax"
    Lamb = "Lamb"
    LambNoBias = "LambNoBias"


class AdaptiveMode(Enum):
    """Which of the optimizers that divide by what gradients were."""

    AdaGrad = "AdaGrad"
    RMSProp = "RMSProp"
    CenteredRMSProp = "CenteredRMSProp"
    AdaDelta = "AdaDelta"


class DataType(Enum):
    """The dtypes of tensors; of an optimizer's state without effect on the software device."""

    FLOAT = "FLOAT"
    FLOAT16 = "FLOAT16"
    DOUBLE = "DOUBLE"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    BOOL = "BOOL"
    UNDEFINED = "UNDEFINED"


class WeightDecayMode(Enum):
    """Whether decay acts on the weight, as in AdamW, or is part of the gradient."""

    Decay = "Decay"
    L2Regularization = "L2Regularization"


class SGDAccumulatorAndMomentum(Enum):
    """Whether accumulated gradients and momentum share a tensor."""

    Combined = "Combined"
    Separate = "Separate"


class DeviceType(Enum):
    """Which device is imitated."""

    Cpu = "Cpu"
    IpuModel = "IpuModel"
    Sim = "Sim"
    OfflineIpu = "OfflineIpu"
    Ipu = "Ipu"


class DeviceConnectionType(Enum):
    """When a session attaches to its device."""

    Always = "Always"
    OnDemand = "OnDemand"
    Never = "Never"


class PatternsLevel(Enum):
    """How many rewritings of a graph are on; without effect on the software device."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


class SyncPattern(Enum):
    """How IPUs wait for each other; without effect on the software device."""

    Full = "Full"
    SinglePipeline = "SinglePipeline"
    ReplicaAndLadder = "ReplicaAndLadder"


class IrSerializationFormat(Enum):
    """In what form a session tells its schedule."""

    JSON = "JSON"


class RecomputeType(Enum):
    """Whether a tensor is kept for backward or computed again; without effect on the software device."""

    Undefined = 0
    Checkpoint = 1
    Recompute = 2
    Recomputed = 3


class TensorStorage(Enum):
    """In which memory a tensor lies; without effect on the software device, which has one."""

    OffChip = "OffChip"
    OnChip = "OnChip"


class TileSet(Enum):
    """Which tiles hold a tensor; without effect on the software device, which has none."""

    Compute = "Compute"
    IO = "IO"
    Undefined = "Undefined"


class ReplicatedTensorSharding(Enum):
    """Whether replicas share an optimizer's state out; without effect on the software device: the numbers are those."""

    Off = "Off"
    On = "On"


class ExecutionPhaseIOSchedule(Enum):
    """When phases load and store; without effect on the software device."""

    Preload = "Preload"
    OnDemand = "OnDemand"


class ExecutionPhaseSchedule(Enum):
    """Order of what a phase does; without effect on the software device."""

    Interleaving = "Interleaving"
    Batch = "Batch"
    BatchClusteredIO = "BatchClusteredIO"


class BatchSerializationBatchSchedule(Enum):
    """Order of parts of a batch; without effect on the software device."""

    Scheduler = "Scheduler"
    Isomorphic = "Isomorphic"
    OverlapOnIo = "OverlapOnIo"
    OverlapOnCompute = "OverlapOnCompute"


class BatchSerializationTransformContext(Enum):
    """When a batch is divided; without effect on the software device."""

    Fwd = "Fwd"
    Bwd = "Bwd"


class BatchSerializationMethod(Enum):
    """How a batch is divided; without effect on the software device."""

    UnrollDynamic = "UnrollDynamic"
    UnrollStatic = "UnrollStatic"
    Loop = "Loop"


class Instrumentation(Enum):
    """Where cycles are counted; without effect on the software device, which counts nanoseconds of a run."""

    Outer = "Outer"
    Inner = "Inner"


class DotCheck(Enum):
    """When a drawing of the graph is made; without effect on the software device."""

    Fwd0 = "Fwd0"
    Fwd1 = "Fwd1"
    Bwd0 = "Bwd0"
    PreAlias = "PreAlias"
    Final = "Final"
    All = "All"


class DeviceSelectionCriterion(Enum):
    """Which of several devices is taken; without effect, all are the same."""

    First = "First"
    Random = "Random"


class MeanReductionStrategy(Enum):
    """When sums become means; without effect on the software device: the numbers are the same."""

    Running = "Running"
    Post = "Post"


class SubgraphCopyingStrategy(Enum):
    """When inputs of parts are copied; without effect on the software device."""

    OnEnterAndExit = "OnEnterAndExit"
    JustInTime = "JustInTime"
