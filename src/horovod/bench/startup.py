"""What starting costs: import, launch, init, shutdown, and the whole way against torchrun."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from horovod.bench.events import Tell
from horovod.bench.jobs import horovodrun, run_job, torchrun
from horovod.bench.mpi_find import clean_environment
from horovod.bench.stats import summarize

__all__ = ["run_startup"]

_JOB_S = 120.0
_NOTHING = ["-c", "pass"]
_RANK = ["-m", "horovod.bench.startup_rank"]


class _Clockwork:
    """Collects seconds by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def command(self, name: str, command: list[str]) -> None:
        """Time a command from start to end."""
        start = time.perf_counter()
        subprocess.run(command, check=True, timeout=_JOB_S, env=clean_environment(), stdout=subprocess.DEVNULL)
        self.add(name, time.perf_counter() - start)

    def job(self, name: str, command: list[str], ranks: int) -> None:
        """Time a job from start to end, and add what its ranks say of their own parts (the slowest rank)."""
        parts: list[dict[str, float]] = []

        def hear(event: dict[str, Any]) -> None:
            parts.append(event["parts"])

        start = time.perf_counter()
        status = run_job(command, hear, timeout_s=_JOB_S)
        self.add(name, time.perf_counter() - start)
        if status != 0 or len(parts) != ranks:
            raise RuntimeError(f"{name}: exit status {status}, {len(parts)} of {ranks} ranks reported")
        for part in parts[0]:
            self.add(part, max(each[part] for each in parts))


def run_startup(ranks: int, tell: Tell, *, rounds: int = 5) -> list[dict[str, Any]]:
    """Measure each part ``rounds`` times, in turns; one process that starts jobs, not a job itself.

    Args:
        ranks: ranks of the jobs that are started.
        tell: progress.
        rounds: how often.

    Returns:
        One row per figure; a row that is a difference of two others says so in its name.
    """
    clock = _Clockwork()
    python = [sys.executable]
    steps: list[tuple[str, Callable[[], None]]] = [
        ("python -c pass", lambda: clock.command("python -c pass", python + _NOTHING)),
        ("import horovod", lambda: clock.command("python -c 'import horovod'", [*python, "-c", "import horovod"])),
        ("import torch", lambda: clock.command("python -c 'import torch'", [*python, "-c", "import torch"])),
        (
            "import horovod.torch",
            lambda: clock.command("python -c 'import horovod.torch'", [*python, "-c", "import horovod.torch"]),
        ),
        ("launch nothing", lambda: clock.command("horovodrun python -c pass", horovodrun(ranks, _NOTHING))),
        ("job", lambda: clock.job("horovodrun, whole job with torch", horovodrun(ranks, [*_RANK, "horovod"]), ranks)),
        ("torchrun", lambda: clock.job("torchrun, whole job with gloo", torchrun(ranks, [*_RANK, "gloo"]), ranks)),
    ]
    for turn in range(rounds):
        for number, (text, step) in enumerate(steps):
            tell(turn * len(steps) + number, rounds * len(steps), text)
            step()
    tell(1, 1, "done")
    rows = [{"name": name, **summarize(times).to_json()} for name, times in clock.times.items()]
    return rows + _differences(clock.times)


def _differences(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """What one thing costs beyond another, pair by pair."""
    pairs = (
        ("import horovod beyond python", "python -c 'import horovod'", "python -c pass"),
        ("import horovod.torch beyond torch", "python -c 'import horovod.torch'", "python -c 'import torch'"),
        ("horovodrun beyond python", "horovodrun python -c pass", "python -c pass"),
        ("whole job beyond torchrun's", "horovodrun, whole job with torch", "torchrun, whole job with gloo"),
    )
    rows = []
    for name, more, less in pairs:
        extra = [a - b for a, b in zip(times[more], times[less], strict=True)]
        rows.append({"name": name, **summarize(extra).to_json()})
    return rows
