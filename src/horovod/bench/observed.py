"""What it costs to be observed: a training step with a timeline being recorded and without, and the flight recorder."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from horovod.bench.control import Control
from horovod.bench.events import Tell
from horovod.bench.models import make_task
from horovod.bench.stats import slowest, summarize
from horovod.bench.stepping import Arm, time_steps
from horovod.bench.train import horovod_arm
from horovod.core.requests import Kind, Request
from horovod.engine.records import ENDED, SEQUENCE, STARTED, TOGETHER, WAITED, Ring, new_ring, now

__all__ = ["run_observed"]

_PLAIN, _TIMELINE, _RECORDER = "no timeline", "timeline", "flight recorder"
_WARM_UP = 3
_RECORDS = 20_000


def run_observed(
    models: Sequence[str],
    hvd: Any,
    control: Control,
    tell: Tell,
    *,
    rounds: int = 7,
    steps: int = 3,
    tiny: bool = False,
) -> list[dict[str, Any]]:
    """Train with and without a recording, in turns and in one process; called on all ranks, in step.

    Args:
        models: names for ``make_task``.
        hvd: ``horovod.torch``.
        control: how the ranks agree.
        tell: progress.
        rounds: how often the two take turns.
        steps: timed steps of one turn; one untimed step goes before them.
        tiny: smoke-size models.

    Returns:
        One row per model; rank 0's is the result.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(models):
            task = make_task(name, control.rank, tiny=tiny)
            trainer = _Trainer(horovod_arm(task), hvd, control, Path(folder) / "timeline.json")
            for turn in range(rounds):
                tell(number * rounds + turn, len(models) * rounds, name)
                # Whatever drifts favours neither: each goes first every other time.
                for is_recorded in (False, True) if turn % 2 else (True, False):
                    trainer.take_turn(is_recorded, steps)
            parameters = sum(parameter.numel() for parameter in task.model.parameters())
            rows.append({"model": name, "parameters": parameters, **trainer.figures()})
    tell(1, 1, "done")
    return rows


class _Trainer:
    """Times turns of steps, with a recording and without.

    Args:
        arm: what is trained.
        hvd: ``horovod.torch``.
        control: how the ranks agree.
        path: of the timeline.
    """

    def __init__(self, arm: Arm, hvd: Any, control: Control, path: Path) -> None:
        self._arm, self._hvd, self._control, self._path = arm, hvd, control, path
        for _ in range(_WARM_UP):
            arm.step()
        before = hvd.stats().operations
        arm.step()
        self._operations: int = hvd.stats().operations - before
        self._times: dict[str, list[list[float]]] = {_PLAIN: [], _TIMELINE: []}
        self._busy_s: list[float] = []

    def take_turn(self, is_recorded: bool, steps: int) -> None:
        """Time some steps."""
        if is_recorded:
            self._hvd.start_timeline(str(self._path))
        self._control.barrier()
        self._arm.step()
        busy = _busy_s()
        spent = time_steps(self._arm, steps)
        busy = _busy_s() - busy
        by_rank = self._control.gather((spent, busy))
        if is_recorded:
            self._hvd.stop_timeline()
            self._busy_s.append(max(busy for _, busy in by_rank) / steps)
        self._times[_TIMELINE if is_recorded else _PLAIN].append(slowest([spent for spent, _ in by_rank]))

    def figures(self) -> dict[str, Any]:
        """Step times, and what each way of being observed adds to a step (median over paired turns)."""
        results: dict[str, dict[str, float]] = {}
        plain_s = median(one for turn in self._times[_PLAIN] for one in turn)
        for name, turns in self._times.items():
            extra = [median(a) - median(b) for a, b in zip(turns, self._times[_PLAIN], strict=True)]
            every = [one for turn in turns for one in turn]
            results[name] = {**summarize(every).to_json(), "fastest_s": min(every), "beyond_s": median(extra)}
        results[_TIMELINE]["busy_s"] = median(self._busy_s)
        # It is never off, hence what it does is timed by itself.
        results[_RECORDER] = {"beyond_s": self._operations * _record_s()}
        for one in results.values():
            one["share"] = one["beyond_s"] / plain_s
        return {"operations": self._operations, "results": results}


def _busy_s() -> float:
    """CPU seconds of the thread that makes the timeline so far; 0 where there is none."""
    for thread in threading.enumerate():
        if thread.name == "horovod-timeline" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def _record_s() -> float:
    """Seconds that the record of one operation takes: to make it, to keep it, and to fill it in."""
    ring, request = new_ring(), Request("x", Kind.ALLREDUCE, 0)
    _fill(ring, request)
    start = time.perf_counter()
    _fill(ring, request)
    return (time.perf_counter() - start) / _RECORDS


def _fill(ring: Ring, request: Request) -> None:
    for sequence in range(_RECORDS):
        record = [request, now(), 0, 0, 0, 0, 0, None]
        ring.append(record)
        record[WAITED] = now()
        record[STARTED], record[SEQUENCE], record[TOGETHER] = now(), sequence, 1
        record[ENDED] = now()
