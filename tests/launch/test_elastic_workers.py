"""Elastic jobs whose processes an adapter starts: here with ``subprocess``, on two names of this machine."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import numpy as np
import pytest

from horovod.core.membership_events import Policy, Slot
from horovod.errors import LaunchError
from horovod.launch.elastic_workers import ElasticWorkers, End, WorkerAdapter

cloudpickle.register_pickle_by_value(sys.modules[__name__])
_STEPS, _WIDTH = 8, 5
_MAIN = """
import os, sys, cloudpickle
from horovod.bindings.hosted import call_hosted
variables, func = cloudpickle.load(sys.stdin.buffer)
try:
    found = call_hosted(variables, func, (), {}), None
except Exception as error:
    found = None, error
cloudpickle.dump(found, sys.stdout.buffer)
"""


class _Processes(WorkerAdapter):
    """Starts processes, and tells how they end."""

    def __init__(self, func: Callable[[], Any]) -> None:
        self._func = func
        self._running: dict[Slot, subprocess.Popen[bytes]] = {}
        self.started: list[Slot] = []
        self.job: ElasticWorkers

    def start(self, slot: Slot, variables: dict[str, str]) -> None:
        self.started.append(slot)
        self._running[slot] = process = subprocess.Popen(
            [sys.executable, "-c", _MAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        with process.stdin:
            cloudpickle.dump((variables, self._func), process.stdin)

    def kill(self, slot: Slot) -> None:
        self._running[slot].kill()

    def describe(self, slot: Slot) -> str:
        return f"process of {slot}"

    def look(self) -> None:
        for slot, process in [(s, p) for s, p in self._running.items() if p.poll() is not None]:
            self.job.ended(self._end(slot, process))
            del self._running[slot]

    def _end(self, slot: Slot, process: subprocess.Popen[bytes]) -> End:
        assert process.stdout is not None
        with process.stdout:
            data = process.stdout.read()
        if process.returncode:
            return End(slot, f"ended with {process.returncode}")
        value, error = cloudpickle.load(io.BytesIO(data))
        if error is None:
            return End(slot, value=value)
        return End(slot, f"raised {error!r}", error=error, text="".join(traceback.format_exception(error)))

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def _job(func: Callable[[], Any], size: int) -> Iterator[tuple[_Processes, ElasticWorkers, list[str]]]:
    adapter, lines = _Processes(func), list[str]()
    policy = Policy(size, is_elastic=True, minimum=size, cool_down_s=(0.1, 1.0), timeout_s=300)
    job = adapter.job = ElasticWorkers(adapter, policy, say=lines.append)
    try:
        yield adapter, job, lines
    finally:
        adapter.close()
        job.close()


def _train(dies: tuple[str, int, int]) -> tuple[int, int, int, list[float]]:
    """Rank, size, process, and the weights after all steps; the process of one slot kills itself at a step."""
    import horovod.numpy as hvd
    from horovod import context

    hvd.init()
    state = hvd.elastic.NumpyState(weights=np.zeros(_WIDTH), batch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < _STEPS:
            data = np.arange(_WIDTH) * (hvd.rank() + 1.0) + state.batch
            place = (os.environ["HOROVOD_HOSTNAME"], int(os.environ["HOROVOD_LOCAL_RANK"]), state.batch)
            if place == dies and context.membership().number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state.weights = state.weights * 0.9 + hvd.allreduce(data, op=hvd.Sum)
            state.batch += 1
            state.commit()

    train(state)
    return hvd.rank(), hvd.size(), os.getpid(), state.weights.tolist()


def _alone(size: int) -> list[float]:
    weights = np.zeros(_WIDTH)
    for batch in range(_STEPS):
        weights = weights * 0.9 + sum(np.arange(_WIDTH) * (rank + 1.0) + batch for rank in range(size))
    return weights.tolist()


def test_a_killed_process_is_replaced_and_the_weights_are_those_of_an_undisturbed_run() -> None:
    def func() -> Any:
        return _train(("b", 0, 3))

    with _job(func, 3) as (adapter, job, lines):
        job.offer({"a": 2, "b": 1})
        found = job.run()
    assert [result[:2] for result in found] == [(rank, 3) for rank in range(3)]
    for *_, weights in found:
        np.testing.assert_allclose(weights, _alone(3), rtol=1e-12)
    assert adapter.started == [Slot("a", 0), Slot("a", 1), Slot("b", 0), Slot("b", 0)]  # the others went on
    assert any("rank 2 (process of b:0) ended with -9" in line and "3 ranks continue" in line for line in lines)
    assert lines[-1].startswith("1 loss and 1 join by step 3, 1 reset")


def test_an_error_before_the_ranks_meet_ends_the_job_and_is_the_cause() -> None:
    def func() -> None:
        raise KeyError("no such data")

    with _job(func, 2) as (_, job, _):
        job.offer({"a": 2})
        with pytest.raises(
            LaunchError, match=r"process of a:[01]\) raised KeyError.*before the ranks had met"
        ) as caught:
            job.run()
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_is_not_elastic_returns_its_values_in_order() -> None:
    def func() -> str:
        return os.environ["HOROVOD_LOCAL_RANK"]

    with _job(func, 2) as (_, job, _):
        job.offer({"a": 2})
        assert job.run() == ["0", "1"]
