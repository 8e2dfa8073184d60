"""The parts of a synchronous allreduce, from the flight recorders of all ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from horovod import context
from horovod.bench.cases import PARTS, Case
from horovod.bench.control import Agreement
from horovod.bench.events import Tell
from horovod.bench.stats import calls_for, mean_of_ranks
from horovod.bench.torch_calls import Ours
from horovod.core.requests import Kind
from horovod.engine.times import ENDED, REQUEST, STARTED, SUBMITTED, WAITED

__all__ = ["run_profile"]


def run_profile(
    sizes: Sequence[int], control: Agreement, tell: Tell, *, rounds: int = 7, round_s: float = 0.05
) -> list[dict[str, Any]]:
    """Time the parts of allreduces of ordinary tensors and of tensors in the arena; called on all ranks.

    Args:
        sizes: bytes of the tensors.
        control: how the ranks agree.
        tell: progress.
        rounds: how often each is measured.
        round_s: seconds of one measurement.

    Returns:
        A row per size; rank 0's is the result. A figure is the median over calls of the mean over ranks. ``copy_s`` and
        ``add_s`` are the times of copying and adding as many bytes in private memory, on all ranks at once.
    """
    rows = []
    ways = (Ours(control), Ours(control, arena=True))
    for number, nbytes in enumerate(sizes):
        case = Case("allreduce", nbytes, "float32", 1)
        results = {}
        for way in ways:
            tell(number, len(sizes), f"{way.name} {nbytes}")
            way.prepare(case)
            warm = way.measure(3)
            columns: list[list[float]] = [[] for _ in ("call", *PARTS)]
            for _ in range(rounds):
                calls = control.broadcast(calls_for(min(warm), round_s))
                warm = way.measure(calls)
                for column, by_rank in zip(columns, zip(*control.gather(_parts(warm)), strict=True), strict=True):
                    column += mean_of_ranks(by_rank)
            way.release()
            names = [f"{part}_s" for part in ("median", *PARTS)]
            results[way.name] = dict(zip(names, map(median, columns), strict=True))
        rows.append({"nbytes": nbytes, "results": results} | _alone(nbytes, control, rounds))
    tell(1, 1, "done")
    return rows


def _parts(calls: Sequence[float]) -> list[list[float]]:
    """Return the seconds of the last calls on this rank: the whole, then each part."""
    records = [record for record in context.engine().ring if record[REQUEST].kind is Kind.ALLREDUCE][-len(calls) :]
    found = []
    for call, record in zip(calls, records, strict=True):
        # A caller that found the operation done did not wait.
        waited = record[WAITED] or record[ENDED]
        marks = (record[SUBMITTED], min(waited, record[STARTED]), record[STARTED], record[ENDED])
        parts = [(end - start) / 1e9 for start, end in itertools.pairwise(marks)]
        found.append([call, *parts, call - sum(parts)])
    return [list(column) for column in zip(*found, strict=True)]


def _alone(nbytes: int, control: Agreement, rounds: int) -> dict[str, float]:
    tensor = torch.zeros(max(1, nbytes // 4))
    other = torch.zeros_like(tensor)
    steps: dict[str, Callable[[], Any]] = {"copy_s": lambda: other.copy_(tensor), "add_s": lambda: tensor.add_(other)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(4 * rounds):
        control.barrier()
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: median(map(median, control.gather(spent))) for name, spent in times.items()}
