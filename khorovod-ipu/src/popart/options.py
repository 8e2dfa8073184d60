"""``SessionOptions``: all options that scripts set, with PopART's defaults; only those of arithmetic have an effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from khorovod_ipu.names import nearest
from popart.enums import (
    AccumulateOuterFragmentSchedule,
    MergeVarUpdateType,
    RecomputationType,
    ReductionType,
    SyntheticDataMode,
    VirtualGraphMode,
)
from popart.locations import TensorLocationSettings

__all__ = ["SessionOptions"]


class _Settings:
    """A group of settings, such as ``batchSerializationSettings``: any name, without effect."""

    def __init__(self, **defaults: Any) -> None:
        self.__dict__.update(defaults)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


#: Options that change what the software device does.
_IN_EFFECT: dict[str, Any] = {
    "accumulationFactor": 1,
    "enableGradientAccumulation": False,
    "replicatedGraphCount": 1,
    "enableReplicatedGraphs": False,
    "accumulationAndReplicationReductionType": ReductionType.Sum,
    "enableDistributedReplicatedGraphs": False,
    "globalReplicationFactor": 1,
    "globalReplicaOffset": 0,
    "hostAllReduce": False,
    "hostWeightUpdate": False,
    "hostAllReduceRemoteBuffer": False,
    "mergeVarUpdate": MergeVarUpdateType.Off,
    "groupNormStridedChannelGrouping": False,
    "enablePipelining": False,
    "virtualGraphMode": VirtualGraphMode.Off,
    "syntheticDataMode": SyntheticDataMode.Off,
    "instrumentWithHardwareCycleCounter": False,
}
#: Accepted without effect: the software device has no compiler and only one memory.
_INERT: dict[str, Any] = {
    **dict.fromkeys(
        ("aliasZeroCopy", "createImplicitPipeliningFwdOnlyProgram", "decomposeGradSum",
         "disableGradAccumulationTensorStreams", "enableEngineCaching", "enableExplicitMainLoops",
         "enableFloatingPointChecks", "enableGroupedMatmuls", "enableLoadAndOffloadRNGState",
         "enableNonStableSoftmax", "enableRngStateManagement", "enableStableNorm", "enableStochasticRounding",
         "ensureFp32LossScaleTensor", "explicitRecomputation", "exportPoplarComputationGraph",
         "exportPoplarVertexGraph", "groupHostSync", "opxAliasChecking", "opxModifyChecking", "rearrangeStreamsOnHost",
         "scheduleNonWeightUpdateGradientConsumersEarly", "useHostCopyOps"), False,
    ),
    **dict.fromkeys(
        ("compileEngine", "constantWeights", "delayVarUpdates", "enableFullyConnectedPass",
         "enableMergeExchange", "enableOutlining", "enableOutliningCopyCostPruning",
         "enablePrefetchDatastreams", "enableSerializedMatmuls", "rearrangeAnchorsOnHost",
         "separateCallOpPdfs", "strictOpVersions", "throwIfLog2ScaleTensorNotInRange"), True,
    ),
    "autoRecomputation": RecomputationType.NoRecompute,
    "cachePath": "", "customCodeletCompileFlags": "", "defaultBufferingDepth": 1,
    "defaultPrefetchBufferingDepth": 1, "finalDotOp": 10000, "firstDotOp": 0, "kahnTieBreaker": "greedy",
    "logDir": "", "looseThresholdAtPeak": 8000, "mergeVarUpdateMemThreshold": 1000000, "numIOTiles": 0,
    "outlineSequenceBreakCost": 10000.0, "outlineThreshold": 1.0, "partialsTypeMatMuls": "",
    "serializedPoprithmsShiftGraphsDir": "", "swapLimitScheduler": -1, "timeLimitScheduler": 1e9,
    "transitiveClosureOptimizationThreshold": 100000, "updatableNamedBuffers": (),
}  # fmt: skip
#: Options that are containers; each session options object has its own.
_CONTAINERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(
        ("engineOptions", "reportOptions", "convolutionOptions", "matmulOptions", "lstmOptions", "gclOptions",
         "prefetchBufferingDepthMap", "bufferingDepthMap"), dict,
    ),
    **dict.fromkeys(("dotChecks", "dotOpNames", "customCodelets", "hardwareInstrumentations"), set),
    **dict.fromkeys(
        ("tensorLocationSettingsOverride", "executionPhaseSettings", "batchSerializationSettings",
         "autodiffSettings", "automaticLossScalingSettings", "developerSettings",
         "replicatedCollectivesSettings", "subgraphCopyingStrategy",
         "meanAccumulationAndReplicationReductionStrategy"), _Settings,
    ),
    **dict.fromkeys(
        ("activationTensorLocationSettings", "weightTensorLocationSettings", "optimizerStateTensorLocationSettings",
         "accumulatorTensorLocationSettings"), TensorLocationSettings,
    ),
    "accumulateOuterFragmentSettings": lambda: _Settings(schedule=AccumulateOuterFragmentSchedule.Serial),
}  # fmt: skip
_OLD_NAMES = {"accumulationReductionType": "accumulationAndReplicationReductionType"}
_KNOWN = {*_IN_EFFECT, *_INERT, *_CONTAINERS, *_OLD_NAMES}


class SessionOptions:
    """Options of a session; all are attributes, set before the session is made.

    Raises:
        AttributeError: an option of this name does not exist.
    """

    def __init__(self) -> None:
        values = {**_IN_EFFECT, **_INERT, **{name: make() for name, make in _CONTAINERS.items()}}
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in _KNOWN:
            raise AttributeError(f"popart.SessionOptions has no option {name!r}{nearest(name, _KNOWN)}")
        return self.__dict__["_values"][_OLD_NAMES.get(name, name)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _KNOWN:
            raise AttributeError(f"popart.SessionOptions has no option {name!r}{nearest(name, _KNOWN)}")
        self.__dict__["_values"][_OLD_NAMES.get(name, name)] = value

    def __dir__(self) -> list[str]:
        return sorted(_KNOWN)

    def __deepcopy__(self, memo: Any) -> SessionOptions:
        return self.copy()

    def copy(self) -> SessionOptions:
        """Return a copy of the options with its own containers."""
        other = SessionOptions()
        for name, value in self.__dict__["_values"].items():
            fresh = type(value)(value) if isinstance(value, dict | set) else value
            other.__dict__["_values"][name] = fresh
        return other

    def replicas(self) -> int:
        """Return the number of replicas in this process."""
        return int(self.replicatedGraphCount) if self.enableReplicatedGraphs else 1

    def accumulation(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        return int(self.accumulationFactor) if self.enableGradientAccumulation else 1
