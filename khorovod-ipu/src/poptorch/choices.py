"""Enumerations for options and functions."""

import enum

__all__ = [
    "AnchorMode", "AutoStage", "ConnectionType", "DataLoaderMode", "HalfFloatCastingBehavior",
    "MatMulSerializationMode", "MeanReductionStrategy", "OutputMode", "OverlapMode", "ReductionType",
    "SharingStrategy", "SyncPattern",
]  # fmt: skip


#: The reduction over gradients, or over parts of a loss.
ReductionType = enum.IntEnum("ReductionType", "Sum Mean NoReduction", start=0)
#: The results that a call returns: those of its last batch, every n-th, all, or their sum.
OutputMode = enum.IntEnum("OutputMode", "Final EveryN All Sum Default", start=0)
AnchorMode = OutputMode  # its older name
#: Whether the calling process or another one loads data.
DataLoaderMode = enum.IntEnum("DataLoaderMode", "Sync Async AsyncRebatched", start=0)

# Without effect in software.
AutoStage = enum.IntEnum("AutoStage", "SameAsIpu AutoIncrement", start=0)
ConnectionType = enum.IntEnum("ConnectionType", "Always OnDemand Never", start=0)
HalfFloatCastingBehavior = enum.IntEnum(
    "HalfFloatCastingBehavior", "FloatDowncastToHalf HalfUpcastToFloat", start=0
)  # fmt: skip
MatMulSerializationMode = enum.Enum("MatMulSerializationMode", "InputChannels ReducingDim OutputChannels Disabled")
MeanReductionStrategy = enum.IntEnum("MeanReductionStrategy", "Running Post", start=0)
OverlapMode = enum.IntEnum("OverlapMode", "NoOverlap OverlapAccumulationLoop OverlapDeviceIterationLoop", start=0)
SharingStrategy = enum.IntEnum("SharingStrategy", "SharedMemory FileSystem Fork ForkServer", start=0)
SyncPattern = enum.IntEnum("SyncPattern", "Full SinglePipeline ReplicaAndLadder", start=0)
