"""Cost of observation: a training step with a timeline and without, and the flight recorder.

horovodrun -np 2 python benchmarks/timeline.py [MODEL]
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import horovod.torch as hvd
from horovod.bench.control import Agreement
from horovod.bench.on_torch import horovod_arm, make_task
from horovod.bench.stats import slowest, summarize
from horovod.bench.stepping import Arm, time_steps
from horovod.core.requests import Kind, Request
from horovod.engine.times import ENDED, SEQUENCE, STARTED, TOGETHER, WAITED, Ring, new_ring, now

_PLAIN, _TIMELINE, _RECORDER = "no timeline", "timeline", "flight recorder"
_WARM_UP = 3
_RECORDS = 20_000


class _Trainer:
    """Times turns of steps, with a recording and without."""

    def __init__(self, arm: Arm, control: Agreement, path: Path) -> None:
        self._arm, self._control, self._path = arm, control, path
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
            hvd.start_timeline(str(self._path))
        self._control.barrier()
        self._arm.step()
        busy = _busy_s()
        spent = time_steps(self._arm, steps)
        busy = _busy_s() - busy
        by_rank = self._control.gather((spent, busy))
        if is_recorded:
            hvd.stop_timeline()
            self._busy_s.append(max(busy for _, busy in by_rank) / steps)
        self._times[_TIMELINE if is_recorded else _PLAIN].append(slowest([spent for spent, _ in by_rank]))

    def figures(self) -> dict[str, Any]:
        """Return step times, and what each kind of observation adds to a step (median over paired turns)."""
        results: dict[str, dict[str, float]] = {}
        plain_s = median(one for turn in self._times[_PLAIN] for one in turn)
        for name, turns in self._times.items():
            extra = [median(a) - median(b) for a, b in zip(turns, self._times[_PLAIN], strict=True)]
            every = [one for turn in turns for one in turn]
            results[name] = {**summarize(every), "fastest_s": min(every), "beyond_s": median(extra)}
        results[_TIMELINE]["busy_s"] = median(self._busy_s)
        # The flight recorder cannot be turned off, so its work is timed separately.
        results[_RECORDER] = {"beyond_s": self._operations * _record_s()}
        for one in results.values():
            one["share"] = one["beyond_s"] / plain_s
        return {"operations": self._operations, "results": results}


def _busy_s() -> float:
    """Return the CPU seconds of the thread that writes the timeline; 0 without one."""
    for thread in threading.enumerate():
        if thread.name == "horovod-timeline" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def _record_s() -> float:
    """Return the seconds that the record of one operation takes."""
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


def main(model: str, rounds: int = 7, steps: int = 5) -> None:
    """Train with and without a recording, in turns, and print what either adds to a step."""
    hvd.init()
    control = Agreement(hvd)
    task = make_task(model.removeprefix("tiny-"), hvd.rank(), tiny=model.startswith("tiny-"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Trainer(horovod_arm(task), control, Path(folder) / "timeline.json")
        for turn in range(rounds):
            # Each goes first every other time, so that a drift favours neither.
            for is_recorded in (False, True) if turn % 2 else (True, False):
                trainer.take_turn(is_recorded, steps)
    if hvd.rank() == 0:
        figures = trainer.figures()
        print(f"{model}: {figures['operations']} operations in a step")
        for name, one in figures["results"].items():
            print(f"{name:16s} adds {one['beyond_s'] * 1e6:8.1f} us, {one['share']:.2%} of a step")
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp")
