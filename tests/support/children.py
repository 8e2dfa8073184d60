"""Calls that a child of a rank, such as a data loader's worker, might try."""

from __future__ import annotations

from typing import Any

import numpy as np

import horovod.numpy as hvd
from horovod.errors import InitError, NotInitializedError

__all__ = ["report"]


def report(results: Any) -> None:
    """Try everything, and put a text for each attempt into ``results``."""
    told: list[str] = []
    try:
        told.append(f"rank {hvd.rank()} of {hvd.size()}")
    except NotInitializedError as error:
        told.append(str(error))
    told.append(str(hvd.is_initialized()))
    for call in (
        lambda: hvd.allreduce(np.ones(1)),
        lambda: hvd.allreduce_async(np.ones(1), name="x"),
        lambda: hvd.barrier(),
    ):
        try:
            call()
            told.append("no error")
        except NotInitializedError as error:
            told.append(str(error))
    try:
        hvd.init()
        told.append("no error")
    except InitError as error:
        told.append(str(error))
    hvd.shutdown()
    results.put(told)
