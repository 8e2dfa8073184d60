"""Memory that training together costs, beyond the model and its gradients."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod.bench.events import Tell
from horovod.bench.jobs import horovodrun, run_job

__all__ = ["ARMS", "run_memory"]

ARMS = ("no communication", "horovod", "ddp")
_JOB_S = 300.0


def run_memory(models: Sequence[str], ranks: int, tell: Tell, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Train each model for a few steps in fresh jobs, one per arm, and compare what the ranks hold.

    Args:
        models: names for ``make_task``.
        ranks: ranks of each job.
        tell: progress.
        tiny: smoke-size models.

    Returns:
        One row per model. Memory is proportional: pages that several ranks share count once in all.
    """
    rows = []
    for number, model in enumerate(models):
        held: dict[str, dict[str, float]] = {}
        for place, arm in enumerate(ARMS):
            tell(number * len(ARMS) + place, len(models) * len(ARMS), f"{model}: {arm}")
            held[arm] = _job(model, arm, ranks, tiny)
        base = held[ARMS[0]]
        rows.append(
            {
                "model": model,
                "gradient_bytes": base["gradient_bytes"],
                "held_bytes": {arm: one["held_bytes"] for arm, one in held.items()},
                "beyond_bytes": {arm: one["held_bytes"] - base["held_bytes"] for arm, one in held.items()},
            }
        )
    tell(1, 1, "done")
    return rows


def _job(model: str, arm: str, ranks: int, tiny: bool) -> dict[str, float]:
    """Run one job; the mean over its ranks."""
    heard: list[dict[str, float]] = []
    directory = tempfile.mkdtemp(prefix="horovod-bench-")
    argv = ["-m", "horovod.bench.memory_rank", str(Path(directory) / "store"), model, arm, "tiny" if tiny else "full"]
    try:
        status = run_job(horovodrun(ranks, argv), lambda event: heard.append(event["held"]), timeout_s=_JOB_S)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if status != 0 or len(heard) != ranks:
        sys.stderr.flush()
        raise RuntimeError(f"{model}, {arm}: exit status {status}, {len(heard)} of {ranks} ranks reported")
    return {name: sum(one[name] for one in heard) / ranks for name in heard[0]}
