"""PopDist: the place of an instance in a job of ``poprun``, and collectives among instances."""

from __future__ import annotations

from typing import NoReturn

from khorovod_ipu.guard import refuse_beside_the_sdk

refuse_beside_the_sdk()

from popdist import collectives, environment  # noqa: E402 - the guard comes first
from popdist.backend import (  # noqa: E402
    defaultCommunicatorId,
    execute_on_instances,
    finalizeBackend,
    init,
    initializeBackend,
    isBackendInitialized,
    registerBackend,
    registerCommunicator,
    registerDefaultBackend,
)
from popdist.collectives import *  # noqa: E402, F403
from popdist.environment import *  # noqa: E402, F403

__all__ = [
    "defaultCommunicatorId", "execute_on_instances", "finalizeBackend", "init", "initializeBackend",
    "isBackendInitialized", "registerBackend", "registerCommunicator", "registerDefaultBackend",
]  # fmt: skip
__all__ += collectives.__all__
__all__ += environment.__all__


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"the software device's popdist has no {name!r}; docs/popdist.md says what it imitates")
