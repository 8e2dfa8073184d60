"""Stalls of every kind: the report names the culprit and what it is doing, and every rank raises the same text."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clocks import blame_only
from commands import run
from harness import LIMIT_S, Ranks
from heard import heard
from launching import PATIENT

import horovod.numpy as hvd
from horovod import context
from horovod.errors import StallError
from horovod.transports.shm import reductions
from horovod.transports.shm.staging import Staging

SIZE, VICTIM = 3, 1
TIMES = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"}


def _rank(
    victim: int, misbehave: Callable[[], None], follow: Callable[[], None], waiting: dict[str, tuple[int, ...]]
) -> tuple[list[str], list[str]]:
    """Return this rank's warnings, and what its calls raised: the one in flight, and the next."""
    if waiting:
        blame_only(victim, waiting)
    raised = []
    with heard() as warnings:
        hvd.allreduce(np.ones(3), name="before")
        if hvd.rank() == victim:
            misbehave()
        for _ in range(2):
            try:
                follow()
            except StallError as error:
                raised.append(str(error))
    return warnings, raised


def _gradient() -> None:
    hvd.allreduce(np.ones(3), name="gradient")


def _endless_python_loop() -> None:
    number = 0
    while context.engine().failure is None:
        number += 1


def _long_sleep() -> None:
    time.sleep(600)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _keep_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(600)


def _stalled(
    misbehave: Callable[[], None],
    follow: Callable[[], None] = _gradient,
    victim: int = VICTIM,
    comes_back: bool = False,
    waiting: dict[str, tuple[int, ...]] | None = None,
    **env: str,
) -> tuple[int, list[Any]]:
    """Run ranks of which one misbehaves; ``waiting`` as in ``blame_only``, by default the others' gradient.

    Returns:
        Its process id, and what the others (it too if it comes back) returned, by rank; None for it if it does not.
    """
    if waiting is None:
        waiting = {"gradient": tuple(rank for rank in range(SIZE) if rank != victim)}
    ranks = Ranks(SIZE, _rank, (victim, misbehave, follow, waiting), env={**TIMES, **env})
    pid = ranks.pid(victim)
    if not comes_back:
        for rank, process in enumerate(ranks.processes):
            if rank != victim:
                process.join(LIMIT_S)
        os.kill(pid, signal.SIGKILL)
    outcomes = ranks.outcomes()
    for outcome in outcomes:
        assert outcome.error is None, outcome.text
    return pid, [outcome.value for outcome in outcomes]


def _line(function: Callable[[], None], text: str) -> str:
    """``File "...", line N, in function`` for the line of this file that holds ``text``."""
    number = next(
        i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.strip() == text and i >= function.__code__.co_firstlineno
    )  # fmt: skip
    return f'File "{__file__}", line {number}, in {function.__name__}'


@pytest.mark.slow
@pytest.mark.parametrize("victim", [VICTIM, 0])
def test_an_endless_loop_in_python(victim: int) -> None:
    pid, results = _stalled(_endless_python_loop, victim=victim, comes_back=True)
    [warning] = results[0][0]
    assert [result[0] for result in results[1:]] == [[], []], "the coordinator warns, and nobody else"
    others = ", ".join(str(rank) for rank in range(SIZE) if rank != victim)
    assert f"allreduce 'gradient' ({__file__}" in warning
    assert f"submitted by ranks {others}, missing: rank {victim}" in warning
    assert f"rank {victim} (pid {pid}" in warning
    assert "is busy with other code" in warning or "is alive, asleep in other code" in warning
    assert re.search(rf'File "{re.escape(__file__)}", line \d+, in _endless_python_loop', warning)
    texts = {text for _, raised in results for text in raised}
    assert len(texts) == 1, "every rank raises the same, also the one that comes late, and again at the next call"
    [text] = texts
    assert f"rank {victim} (pid {pid}" in text
    assert "_endless_python_loop" in text
    assert "(limit: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=1)" in text
    assert all(len(raised) == 2 for _, raised in results)


@pytest.mark.slow
def test_a_rank_that_sleeps() -> None:
    pid, results = _stalled(_long_sleep)
    [warning] = results[0][0]
    assert f"rank {VICTIM} (pid {pid}" in warning
    assert "is alive, asleep in other code; its main thread:" in warning
    assert _line(_long_sleep, "time.sleep(600)") in warning
    assert "    time.sleep(600)" in warning


@pytest.mark.slow
def test_a_stopped_rank_is_told_apart_from_a_busy_one() -> None:
    pid, results = _stalled(_stop)
    [warning] = results[0][0]
    assert f"is stopped by a signal (SIGSTOP, or Ctrl-Z); `kill -CONT {pid}` wakes it" in warning
    assert "main thread" not in warning


@pytest.mark.slow
def test_a_rank_whose_engine_cannot_run() -> None:
    pid, results = _stalled(_keep_the_interpreter)
    [text] = {text for result in results if result for text in result[1]}
    assert f"rank {VICTIM} (pid {pid}" in text
    assert "does not answer: it is alive, but its engine thread cannot run" in text
    assert "GIL" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misbehave", "words"), [(_stop, "is stopped by a signal"), (_keep_the_interpreter, "its engine thread cannot run")]
)
def test_the_coordinator_itself_is_stuck(misbehave: Callable[[], None], words: str) -> None:
    pid, results = _stalled(misbehave, victim=0)
    texts = [text for result in results[1:] for text in [*result[0], *result[1]]]
    assert len(texts) >= 4
    for text in texts:
        assert f"rank 0 (pid {pid}" in text
        assert words in text
        assert "allreduce 'gradient'" in text


def _stop_in_the_middle() -> None:
    original = Staging.exchange

    def stopping(self: Any, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        original(self, *args)

    Staging.exchange = stopping  # type: ignore[method-assign]


def _large() -> None:
    hvd.allreduce_(np.ones(500_000), name="large")


def _stop_among_results() -> None:
    reductions.find_results = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]


def _large_result() -> None:
    hvd.allreduce(np.ones(500_000), name="large")


@pytest.mark.slow
@pytest.mark.parametrize(("misbehave", "follow"), [(_stop_in_the_middle, _large), (_stop_among_results, _large_result)])
def test_a_rank_that_stops_in_the_middle_of_an_operation(
    misbehave: Callable[[], None], follow: Callable[[], None]
) -> None:
    pid, results = _stalled(misbehave, follow)
    warnings = [warning for result in results if result for warning in result[0]]
    texts = [text for result in results if result for text in result[1]]
    assert warnings and len(texts) == 4
    for text in [*warnings, *texts]:
        assert "in the middle of allreduce 'large'" in text
        assert f"rank {VICTIM} (pid {pid}" in text
        assert "is stopped by a signal" in text


@pytest.mark.slow
def test_a_warning_alone_ends_nothing(tmp_path: Path) -> None:
    def late() -> None:
        # Rank 0 warns, and then writes.
        while not (tmp_path / "rank-0.json").exists():
            time.sleep(0.01)

    env = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0", "HOROVOD_FLIGHT_RECORDER_DIR": str(tmp_path)}
    _, results = _stalled(late, comes_back=True, **env)
    assert [len(warnings) for warnings, _ in results] == [1, 0, 0]
    assert all(raised == [] for _, raised in results)


IN_BACKWARD = """
import torch
import horovod.torch as hvd

class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if hvd.rank() == 0:
            raise ValueError("not a number")
        return gradient

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
Faulty.apply(model(torch.ones(2, 4))).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
def test_an_exception_inside_backward_is_named_on_the_other_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IN_BACKWARD)
    code, output = run([*PATIENT, "-np", "2", "python", str(script)], tmp_path, OMP_NUM_THREADS="1")
    assert code == 1
    [error] = [line for line in output.splitlines() if "PeerLostError: rank 0" in line and line.startswith("[1]")]
    assert f"ended with ValueError: not a number at {script}:13" in error
