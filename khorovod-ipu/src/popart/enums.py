"""The enumerations of PopART, as far as scripts of data-parallel training name them."""

from __future__ import annotations

from enum import Enum, IntEnum

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "AdamMode",
    "AdaptiveMode",
    "AnchorReturnTypeId",
    "DataType",
    "DeviceConnectionType",
    "DeviceType",
    "IrSerializationFormat",
    "MergeVarUpdateType",
    "PatternsLevel",
    "RecomputationType",
    "ReductionType",
    "SGDAccumulatorAndMomentum",
    "SyncPattern",
    "SyntheticDataMode",
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
