"""The programming interface of PopART over a device in software: graphs are ONNX, torch executes and differentiates.

What it imitates and what it does not: docs/popart.md in khorovod's repository.
"""

from __future__ import annotations

from khorovod_ipu.guard import refuse_beside_the_sdk

refuse_beside_the_sdk()

from popart.builder import Builder, DebugContext  # noqa: E402
from popart.dataflow import AnchorReturnType, DataFlow, InputSettings, InputShapeInfo  # noqa: E402
from popart.devices import DeviceInfo, DeviceManager  # noqa: E402
from popart.enums import (  # noqa: E402
    AccumulateOuterFragmentSchedule,
    AdamMode,
    AdaptiveMode,
    AnchorReturnTypeId,
    BatchSerializationBatchSchedule,
    BatchSerializationMethod,
    BatchSerializationTransformContext,
    DataType,
    DeviceConnectionType,
    DeviceSelectionCriterion,
    DeviceType,
    DotCheck,
    ExecutionPhaseIOSchedule,
    ExecutionPhaseSchedule,
    Instrumentation,
    IrSerializationFormat,
    MeanReductionStrategy,
    MergeVarUpdateType,
    PatternsLevel,
    RecomputationType,
    RecomputeType,
    ReductionType,
    ReplicatedTensorSharding,
    SGDAccumulatorAndMomentum,
    SubgraphCopyingStrategy,
    SyncPattern,
    SyntheticDataMode,
    TensorStorage,
    TileSet,
    VirtualGraphMode,
    WeightDecayMode,
)
from popart.errors import OutOfMemoryException, popart_exception  # noqa: E402
from popart.hostreduce import COPY_PREFIX, GRADIENT, VAR_COPY_PREFIX  # noqa: E402
from popart.locations import TensorLocation, TensorLocationSettings  # noqa: E402
from popart.logs import getLogger  # noqa: E402
from popart.optimizers import (  # noqa: E402
    SGD,
    Adam,
    Adaptive,
    ClipNormSettings,
    ConstSGD,
    Optimizer,
    OptimizerValue,
)
from popart.options import SessionOptions  # noqa: E402
from popart.session import InferenceSession  # noqa: E402
from popart.stepio import PyStepIO, PyStepIOCallback, PyWeightsIO  # noqa: E402
from popart.tensors import TensorInfo  # noqa: E402
from popart.training import TrainingSession  # noqa: E402

__all__ = [
    "SGD",
    "AccumulateOuterFragmentSchedule",
    "Adam",
    "AdamMode",
    "Adaptive",
    "AdaptiveMode",
    "AnchorReturnType",
    "AnchorReturnTypeId",
    "BatchSerializationBatchSchedule",
    "BatchSerializationMethod",
    "BatchSerializationTransformContext",
    "Builder",
    "ClipNormSettings",
    "ConstSGD",
    "DataFlow",
    "DataType",
    "DebugContext",
    "DeviceConnectionType",
    "DeviceInfo",
    "DeviceManager",
    "DeviceSelectionCriterion",
    "DeviceType",
    "DotCheck",
    "ExecutionPhaseIOSchedule",
    "ExecutionPhaseSchedule",
    "InferenceSession",
    "InputSettings",
    "InputShapeInfo",
    "Instrumentation",
    "IrSerializationFormat",
    "MeanReductionStrategy",
    "MergeVarUpdateType",
    "Optimizer",
    "OptimizerValue",
    "OutOfMemoryException",
    "Patterns",
    "PatternsLevel",
    "PyStepIO",
    "PyStepIOCallback",
    "PyWeightsIO",
    "RecomputationType",
    "RecomputeType",
    "ReductionType",
    "ReplicatedTensorSharding",
    "SGDAccumulatorAndMomentum",
    "SessionOptions",
    "SubgraphCopyingStrategy",
    "SyncPattern",
    "SyntheticDataMode",
    "TensorInfo",
    "TensorLocation",
    "TensorLocationSettings",
    "TensorStorage",
    "TileSet",
    "TrainingSession",
    "VirtualGraphMode",
    "WeightDecayMode",
    "getLogger",
    "hostReduceGradCopyPrefix",
    "hostReduceVarCopyPrefix",
    "popart_exception",
    "reservedGradientPrefix",
]


def __getattr__(name: str) -> object:
    raise AttributeError(f"the software device's popart has no {name!r}; docs/popart.md says what it imitates")


class Patterns:
    """Which rewritings of the graph are on: accepted, without effect on the software device.

    Args:
        chosen: names, or a level.
    """

    def __init__(self, *chosen: object) -> None:
        self.chosen = chosen

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self


def reservedGradientPrefix() -> str:
    """Return what the ids of gradients begin with."""
    return GRADIENT


def hostReduceGradCopyPrefix() -> str:
    """Return what the names of copies of gradients begin with."""
    return COPY_PREFIX


def hostReduceVarCopyPrefix() -> str:
    """Return what the names of copies of weights begin with."""
    return VAR_COPY_PREFIX
