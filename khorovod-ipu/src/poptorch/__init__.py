"""PopTorch in software: the parts for data-parallel training."""

from __future__ import annotations

from khorovod_ipu.guard import refuse_beside_the_sdk

refuse_beside_the_sdk()

from khorovod_ipu import __version__  # noqa: E402 - the guard comes first
from khorovod_ipu.names import nearest as _nearest  # noqa: E402
from poptorch import choices, control, hints, optim  # noqa: E402
from poptorch.choices import *  # noqa: E402, F403 - all of it, by its own list
from poptorch.control import *  # noqa: E402, F403 - all of it, by its own list
from poptorch.data import AsynchronousDataAccessor, DataLoader  # noqa: E402
from poptorch.executor import PoplarExecutor, inferenceModel, trainingModel  # noqa: E402
from poptorch.hints import *  # noqa: E402, F403 - all of it, by its own list
from poptorch.options import Options  # noqa: E402

__all__ = [
    "AsynchronousDataAccessor", "DataLoader", "Options", "PoplarExecutor", "__version__", "inferenceModel",
    "ipuHardwareIsAvailable", "ipuHardwareVersion", "optim", "setLogLevel", "trainingModel",
]  # fmt: skip
__all__ += control.__all__
__all__ += hints.__all__
__all__ += choices.__all__


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return False: there is no hardware device, models run in software.

    Args:
        num_ipus: number of needed devices.
    """
    return False


def ipuHardwareVersion() -> int:
    """Return the version of the hardware: 0, because there is none."""
    return 0


def setLogLevel(level: str | int) -> None:
    """Do nothing; accepted for compatibility.

    Args:
        level: a level of PopTorch.
    """


def __getattr__(name: str) -> object:
    hint = _nearest(name, __all__) or ": PopTorch in software imitates data-parallel training only"
    raise AttributeError(f"module 'poptorch' has no attribute {name!r}{hint}")
