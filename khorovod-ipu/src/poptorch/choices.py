"""The words that options and functions take."""

from __future__ import annotations

import enum

__all__ = [
    "AnchorMode",
    "AutoStage",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "OutputMode",
    "OverlapMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
]


class ReductionType(enum.IntEnum):
    """How several gradients, or several parts of a loss, become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class OutputMode(enum.IntEnum):
    """Which results of a call come back: of its last batch, every n-th, all of them, or their sum."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class DataLoaderMode(enum.IntEnum):
    """Who loads data: the caller, or a process beside it."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How a process that loads data hands it over; there is no such process here but torch's own."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(enum.IntEnum):
    """When to attach to a device."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(enum.IntEnum):
    """How devices wait for each other; of no effect in software."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class MeanReductionStrategy(enum.IntEnum):
    """When a mean is divided; of no effect in software."""

    Running = 0
    Post = 1


class HalfFloatCastingBehavior(enum.IntEnum):
    """What half and float make together; of no effect in software."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1


AnchorMode = OutputMode  # as it was called first


class OverlapMode(enum.IntEnum):
    """Whether input and output overlap with computing; of no effect in software."""

    NoOverlap = 0
    OverlapAccumulationLoop = 1
    OverlapDeviceIterationLoop = 2


class AutoStage(enum.IntEnum):
    """How blocks become stages; of no effect in software."""

    SameAsIpu = 0
    AutoIncrement = 1


class MatMulSerializationMode(enum.Enum):
    """Along which dimension a product is cut; of no effect in software."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"
