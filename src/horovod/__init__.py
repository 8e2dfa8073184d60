"""Data-parallel training with five changed lines: the Horovod API, rebuilt.

    horovod.torch, horovod.numpy    the API that a training script imports as ``hvd``
    bindings                        adapts the API to a framework; written once over an Adapter
    engine                          one per process: submits requests, runs the log
    core                            decides: pure state machines, no I/O
    transports                      moves bytes between ranks
    launch, rendezvous              starts processes; lets them find each other

This package gathers only the launcher's entry points and loads no framework.
"""

from __future__ import annotations

from typing import Any

from horovod._version import HOROVOD_VERSION

__all__ = ["__version__", "interactive", "run"]

__version__ = HOROVOD_VERSION


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovod.launch.run import run

        return run
    if name == "interactive":
        from horovod.notebook.magic import interactive

        return interactive
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
