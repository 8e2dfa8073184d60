"""The parts of a synchronous allreduce, from the flight recorders of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any

from horovod import context
from horovod.bench.cases import PARTS, Case
from horovod.bench.control import Agreement, Tell
from horovod.bench.on_torch import Ours
from horovod.bench.stats import calls_for, mean_of_ranks
from horovod.core.requests import Kind
from horovod.engine.times import ENDED, REQUEST, STARTED, SUBMITTED

__all__ = ["run_profile"]

#: Seconds of one measurement.
_ROUND_S = 0.05


def run_profile(sizes: Sequence[int], control: Agreement, tell: Tell, *, rounds: int = 7) -> list[dict[str, Any]]:
    """Time the parts of allreduces of ordinary tensors and of tensors in the arena; called on all ranks.

    Return a row per size; rank 0's is the result. A figure is the median over calls of the mean over ranks.
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
                calls = control.broadcast(calls_for(min(warm), _ROUND_S))
                warm = way.measure(calls)
                for column, by_rank in zip(columns, zip(*control.gather(_parts(warm)), strict=True), strict=True):
                    column += mean_of_ranks(by_rank)
            way.release()
            names = [f"{part}_s" for part in ("median", *PARTS)]
            results[way.name] = dict(zip(names, map(median, columns), strict=True))
        rows.append({"nbytes": nbytes, "results": results})
    tell(1, 1, "done")
    return rows


def _parts(calls: Sequence[float]) -> list[list[float]]:
    """Return the seconds of the last calls on this rank: the whole, then each part."""
    records = [record for record in context.engine().ring if record[REQUEST].kind is Kind.ALLREDUCE][-len(calls) :]
    found = []
    for call, record in zip(calls, records, strict=True):
        marks = (record[SUBMITTED], record[STARTED], record[ENDED])
        parts = [(end - start) / 1e9 for start, end in itertools.pairwise(marks)]
        found.append([call, *parts, call - sum(parts)])
    return [list(column) for column in zip(*found, strict=True)]
