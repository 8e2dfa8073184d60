"""The enumerations of PopART that data-parallel training scripts use."""

from enum import Enum, IntEnum

__all__ = [
    "AccumulateOuterFragmentSchedule", "AdamMode", "AdaptiveMode", "AnchorReturnTypeId",
    "BatchSerializationBatchSchedule", "BatchSerializationMethod", "BatchSerializationTransformContext", "DataType",
    "DeviceConnectionType", "DeviceSelectionCriterion", "DeviceType", "DotCheck", "ExecutionPhaseIOSchedule",
    "ExecutionPhaseSchedule", "Instrumentation", "IrSerializationFormat", "MeanReductionStrategy",
    "MergeVarUpdateType", "PatternsLevel", "RecomputationType", "RecomputeType", "ReductionType",
    "ReplicatedTensorSharding", "SGDAccumulatorAndMomentum", "SubgraphCopyingStrategy", "SyncPattern",
    "SyntheticDataMode", "TensorStorage", "TileSet", "VirtualGraphMode", "WeightDecayMode",
]  # fmt: skip

#: The reduction over samples, replicas or micro-batches.
ReductionType = Enum("ReductionType", {"Sum": "Sum", "Mean": "Mean", "NoReduction": "NoReduction"})
#: The values of an anchor that a run returns to the host.
AnchorReturnTypeId = IntEnum("AnchorReturnTypeId", "Final EveryN All Sum", start=0)
#: The dtypes of tensors; the dtype of an optimizer's state is without effect on the software device.
DataType = Enum(
    "DataType", "FLOAT FLOAT16 DOUBLE INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL UNDEFINED"
)  # fmt: skip
#: Source of inputs: the host, or generated on the device.
SyntheticDataMode = Enum("SyntheticDataMode", "Off Zeros RandomNormal")
#: The type of the imitated device.
DeviceType = Enum("DeviceType", "Cpu IpuModel Sim OfflineIpu Ipu")
#: The format in which a session returns its schedule.
IrSerializationFormat = Enum("IrSerializationFormat", "JSON")

# Optimizers.
AdamMode = Enum("AdamMode", "Adam AdamNoBias AdaMax Lamb LambNoBias")
AdaptiveMode = Enum("AdaptiveMode", "AdaGrad RMSProp CenteredRMSProp AdaDelta")
#: Whether decay acts on the weight, as in AdamW, or is part of the gradient.
WeightDecayMode = Enum("WeightDecayMode", "Decay L2Regularization")
#: Whether accumulated gradients and momentum share a tensor.
SGDAccumulatorAndMomentum = Enum("SGDAccumulatorAndMomentum", "Combined Separate")

# Without effect on the software device, except that some values cannot be combined with others.
VirtualGraphMode = Enum("VirtualGraphMode", "Off Manual Auto ExecutionPhases")
MergeVarUpdateType = Enum("MergeVarUpdateType", "Off All AutoLoose AutoTight")
AccumulateOuterFragmentSchedule = Enum(
    "AccumulateOuterFragmentSchedule", "Scheduler Serial OverlapCycleOptimized OverlapMemoryOptimized"
)
BatchSerializationBatchSchedule = Enum(
    "BatchSerializationBatchSchedule", "Scheduler Isomorphic OverlapOnIo OverlapOnCompute"
)
BatchSerializationMethod = Enum("BatchSerializationMethod", "UnrollDynamic UnrollStatic Loop")
BatchSerializationTransformContext = Enum("BatchSerializationTransformContext", "Fwd Bwd")
DeviceConnectionType = Enum("DeviceConnectionType", "Always OnDemand Never")
DeviceSelectionCriterion = Enum("DeviceSelectionCriterion", "First Random")
DotCheck = Enum("DotCheck", "Fwd0 Fwd1 Bwd0 PreAlias Final All")
ExecutionPhaseIOSchedule = Enum("ExecutionPhaseIOSchedule", "Preload OnDemand")
ExecutionPhaseSchedule = Enum("ExecutionPhaseSchedule", "Interleaving Batch BatchClusteredIO")
Instrumentation = Enum("Instrumentation", "Outer Inner")
MeanReductionStrategy = Enum("MeanReductionStrategy", "Running Post")
PatternsLevel = Enum("PatternsLevel", "NoPatterns Minimal Default All", start=0)
RecomputeType = Enum("RecomputeType", "Undefined Checkpoint Recompute Recomputed", start=0)
RecomputationType = Enum("RecomputationType", "NoRecompute Standard NormOnly Pipeline RecomputeAll")
ReplicatedTensorSharding = Enum("ReplicatedTensorSharding", "Off On")
SubgraphCopyingStrategy = Enum("SubgraphCopyingStrategy", "OnEnterAndExit JustInTime")
SyncPattern = Enum("SyncPattern", "Full SinglePipeline ReplicaAndLadder")
TensorStorage = Enum("TensorStorage", "OffChip OnChip")
TileSet = Enum("TileSet", "Compute IO Undefined")
