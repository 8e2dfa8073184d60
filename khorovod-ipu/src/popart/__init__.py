"""PopART's programming interface on a software device: graphs are ONNX, torch executes and differentiates them.

docs/popart.md in khorovod's repository lists the supported parts.
"""

from __future__ import annotations

from khorovod_ipu.guard import refuse_beside_the_sdk

refuse_beside_the_sdk()

from popart import dataflow, enums, locations  # noqa: E402 - the guard comes first
from popart.builder import Builder, DebugContext  # noqa: E402
from popart.dataflow import *  # noqa: E402, F403
from popart.devices import DeviceInfo, DeviceManager  # noqa: E402
from popart.enums import *  # noqa: E402, F403
from popart.errors import OutOfMemoryException, popart_exception  # noqa: E402
from popart.hostreduce import COPY_PREFIX, GRADIENT, VAR_COPY_PREFIX  # noqa: E402
from popart.locations import *  # noqa: E402, F403
from popart.logs import getLogger  # noqa: E402
from popart.optimizers import SGD, Adam, Adaptive, ClipNormSettings, ConstSGD, Optimizer, OptimizerValue  # noqa: E402
from popart.options import SessionOptions  # noqa: E402
from popart.session import InferenceSession  # noqa: E402
from popart.stepio import PyStepIO, PyStepIOCallback, PyWeightsIO  # noqa: E402
from popart.tensors import TensorInfo  # noqa: E402
from popart.training import TrainingSession  # noqa: E402

__all__ = [
    "SGD", "Adam", "Adaptive", "Builder", "ClipNormSettings", "ConstSGD", "DebugContext", "DeviceInfo",
    "DeviceManager", "InferenceSession", "Optimizer", "OptimizerValue", "OutOfMemoryException", "Patterns",
    "PyStepIO", "PyStepIOCallback", "PyWeightsIO", "SessionOptions", "TensorInfo", "TrainingSession", "getLogger",
    "hostReduceGradCopyPrefix", "hostReduceVarCopyPrefix", "popart_exception", "reservedGradientPrefix",
]  # fmt: skip
__all__ += dataflow.__all__
__all__ += enums.__all__
__all__ += locations.__all__


def __getattr__(name: str) -> object:
    raise AttributeError(f"the software device's popart has no {name!r}; docs/popart.md says what it imitates")


class Patterns:
    """A choice of graph rewritings; accepted, without effect on the software device.

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
    """Return the prefix of the ids of gradients."""
    return GRADIENT


def hostReduceGradCopyPrefix() -> str:
    """Return the prefix of the names of copies of gradients."""
    return COPY_PREFIX


def hostReduceVarCopyPrefix() -> str:
    """Return the prefix of the names of copies of weights."""
    return VAR_COPY_PREFIX
