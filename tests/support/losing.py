"""Collectives of gradients that fail as they do when a rank is lost, or in which this rank dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from elastic_double import Job, make_job

import horovod.numpy as hvd
from horovod import context
from horovod.core.requests import Kind
from horovod.engine.engine import Engine
from horovod.errors import PeerLostError

__all__ = ["Losses", "dying", "losing"]


class Losses:
    """The losses of a job.

    Attributes:
        job: the job.
        count: how many there were.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.count = job, 0


@contextmanager
def _in_reductions(act: Callable[[int], None]) -> Iterator[None]:
    """Call a function at the start of every allreduce of floats, inside of compiled steps, too."""
    count = [0]

    def acting(real: Any) -> Any:
        def call(engine: Any, what: Any, adapter: Any, inputs: Any = (), *args: Any, **kwargs: Any) -> Any:
            if what.kind is Kind.ALLREDUCE and any("float" in str(array.dtype) for array in inputs):
                count[0] += 1
                act(count[0])
            return real(engine, what, adapter, inputs, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("run", "submit"):
            patch.setattr(Engine, name, acting(getattr(Engine, name)))
        yield


def dying(number: int) -> AbstractContextManager[None]:
    """Kill rank 1 of the first membership in its allreduce of floats of that number."""

    def die(now: int) -> None:
        if now == number and hvd.rank() == 1 and context.membership().number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return _in_reductions(die)


@contextmanager
def losing(which: Collection[int]) -> Iterator[Losses]:
    """Be an elastic job of one rank, in which some allreduces of floats fail."""
    with pytest.MonkeyPatch.context() as patch:
        losses = Losses(make_job(patch))

        def act(number: int) -> None:
            if number in which:
                losses.count += 1
                raise PeerLostError(f"rank 1 is lost by the test, in reduction {number}")

        with _in_reductions(act):
            yield losses
