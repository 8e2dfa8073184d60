"""A wait with a limit: an operation that is not done then goes on in the background."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import on_ranks

import horovod.numpy as hvd
from horovod import context
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.core.requests import Kind
from horovod.engine.calls import call
from horovod.engine.loop import Loop


def _is_finished_behind(handle: Any) -> None:
    done = threading.Lock()
    done.acquire()
    handle.waiters.append(done)
    go = hvd.allreduce_async(np.ones(1), name="go")
    # Nobody waits in the engine: its own thread does the rest.
    assert handle.done or done.acquire(timeout=300)
    assert handle.outputs[0].tolist() == [2, 2, 2]
    hvd.synchronize(go)


@pytest.mark.parametrize("has_met", [False, True])
@pytest.mark.parametrize("late", [0, 1])
@on_ranks(2)
def test_what_runs_for_a_limited_time_is_finished_in_the_background(late: int, has_met: bool) -> None:
    engine, values = context.engine(), np.ones(3)
    what = call(Kind.ALLREDUCE, "x")

    def run(limit_s: float) -> Any:
        return engine.run(what, NumpyAdapter(), [values], limit_s=limit_s)

    for _ in range(3 * has_met):
        assert run(300.0).outputs[0].tolist() == [2, 2, 2]
    if hvd.rank() == late:
        # The other one has waited in vain by now.
        hvd.allreduce(np.ones(1), name="go")
        assert run(300.0).outputs[0].tolist() == [2, 2, 2]
        return
    handle = run(0.01)
    assert not handle.done
    _is_finished_behind(handle)


def test_the_engines_thread_is_woken_for_what_runs_longer_than_its_limit() -> None:
    """It may sleep for half a minute, and would see only then that another rank is lost."""
    rings: list[int] = []
    signals = SimpleNamespace(allows=lambda: True, enter=lambda: None, leave=lambda: None)
    engine: Any = SimpleNamespace(
        _signals=signals,
        _state=SimpleNamespace(submit=lambda handle: None),
        _work_if_free=lambda handle, limit_s: True,
        _wake=lambda: rings.append(1),
        is_over=False,
    )
    handle: Any = SimpleNamespace(done=False)
    Loop.run(engine, handle, 0.01)
    assert rings == [1]
