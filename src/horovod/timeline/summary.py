"""The time of each step of a timeline by its causes, and the rank that delays the others."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.timeline.read import Op, RankTrace, Span

__all__ = ["RankSummary", "StepSummary", "Summary", "TensorSummary", "summarise"]


@dataclass(frozen=True)
class StepSummary:
    """One step of one rank; times in milliseconds."""

    number: int  # counts from 0
    rank: int
    begin_ms: float  # when it began
    total_ms: float  # how long it took
    compute_ms: float  # no thread waited for communication
    for_ranks_ms: float  # a thread waited because some rank had not come yet
    for_data_ms: float  # a thread waited though all ranks had come
    communication_ms: float  # the engine executed operations
    overlap: float  # share of communication_ms during which no thread waited

    @property
    def exposed_ms(self) -> float:
        """Communication that computing did not hide."""
        return self.for_ranks_ms + self.for_data_ms


@dataclass(frozen=True)
class RankSummary:
    """One rank over all steps."""

    rank: int
    mean: StepSummary  # its average step
    last: float  # the share of operations for which it came last
    delay_ms: float  # time per step in which operations waited for this rank alone


@dataclass(frozen=True)
class TensorSummary:
    """All operations of one name, on all ranks; times are averages in milliseconds."""

    name: str
    count: int  # number of its executions
    bytes: int  # bytes of one rank's tensors, each time
    negotiate_ms: float  # from the submission until the last rank's submission
    queue_ms: float  # from then until the engine had time for it
    execute_ms: float  # its execution
    exposed_ms: float  # time that a thread waited for it
    site: str  # the user's line


@dataclass(frozen=True)
class Summary:
    """The summary of a timeline."""

    anchor: str  # the operation whose submission begins a step; empty if nothing was repeated
    steps: list[StepSummary]  # every step of every rank
    ranks: list[RankSummary]  # every rank
    tensors: list[TensorSummary]  # every name, the one with the longest waits first
    operations: int  # number of operations of a rank, on average
    bytes: int  # bytes of all ranks' tensors
    errors: list[str]  # the errors, each once
    resets: int = 0  # number of changes of the job's members


def summarise(ranks: Mapping[int, RankTrace]) -> Summary:
    """Compute the summary of a trace."""
    anchor = _anchor(next(iter(ranks.values())).ops)
    steps = [step for rank, trace in sorted(ranks.items()) for step in _steps(rank, trace, anchor)]
    last, delay_us, known = _stragglers(ranks)
    summaries = []
    for rank in sorted(ranks):
        own = [step for step in steps if step.rank == rank]
        if own:
            share = last[rank] / known if known else 0.0
            summaries.append(RankSummary(rank, _mean(own), share, delay_us[rank] / 1000 / len(own)))
    every = [op for trace in ranks.values() for op in trace.ops]
    return Summary(
        anchor=anchor,
        steps=steps,
        ranks=summaries,
        tensors=_tensors(every, len(ranks)),
        operations=len(every) // len(ranks),
        bytes=sum(op.bytes for op in every),
        errors=sorted({op.error for op in every if op.error}),
        resets=len(next(iter(ranks.values())).resets),
    )


def _anchor(ops: Sequence[Op]) -> str:
    """Return the first name that occurs once in each step; most names occur equally often, which gives the number."""
    counts = collections.Counter(op.name for op in ops if op.started)
    repeated = {name: count for name, count in counts.items() if count > 1}
    if not repeated:
        return ""
    named = {name: count for name, count in repeated.items() if not name.endswith(".noname")} or repeated
    usual = max(collections.Counter(named.values()).items(), key=lambda item: (item[1], item[0]))[0]
    return next(op.name for op in ops if named.get(op.name) == usual)


def _steps(rank: int, trace: RankTrace, anchor: str) -> list[StepSummary]:
    if not trace.ops:
        return []
    end = max(max(op.ended, op.ready) for op in trace.ops)
    begins = [op.submitted for op in trace.ops if op.name == anchor] if anchor else [trace.ops[0].submitted]
    # The part after the last anchor may not be a whole step.
    spans = list(itertools.pairwise(begins)) if len(begins) > 2 else list(zip(begins, [*begins[1:], end], strict=False))
    waits, executions = _Times(trace.waits), _Times(trace.executions)
    # Until an operation is ready, waiting for it is waiting for a rank.
    for_ranks = _Times((op.waited, min(op.ready, op.ended)) for op in trace.ops if op.waited is not None)
    return [
        _step(number, rank, span, waits.within(span), executions.within(span), for_ranks.within(span))
        for number, span in enumerate(spans)
    ]


def _step(
    number: int, rank: int, span: Span, waited: list[Span], busy: list[Span], for_ranks: list[Span]
) -> StepSummary:  # fmt: skip
    total, exposed, communication = span[1] - span[0], _length(waited), _length(busy)
    ranks_us = min(_length(for_ranks), exposed)
    during = _Times(busy)
    hidden = communication - sum(_length(during.within(wait)) for wait in waited)
    return StepSummary(
        number=number,
        rank=rank,
        begin_ms=span[0] / 1000,
        total_ms=total / 1000,
        compute_ms=(total - exposed) / 1000,
        for_ranks_ms=ranks_us / 1000,
        for_data_ms=(exposed - ranks_us) / 1000,
        communication_ms=communication / 1000,
        overlap=hidden / communication if communication else 0.0,
    )


def _mean(steps: Sequence[StepSummary]) -> StepSummary:
    def mean(name: str) -> float:
        return float(sum(getattr(step, name) for step in steps) / len(steps))

    communication = sum(step.communication_ms for step in steps)
    hidden = sum(step.communication_ms * step.overlap for step in steps)
    return StepSummary(
        number=len(steps),
        rank=steps[0].rank,
        begin_ms=steps[0].begin_ms,
        total_ms=mean("total_ms"),
        compute_ms=mean("compute_ms"),
        for_ranks_ms=mean("for_ranks_ms"),
        for_data_ms=mean("for_data_ms"),
        communication_ms=mean("communication_ms"),
        overlap=hidden / communication if communication else 0.0,
    )


def _stragglers(ranks: Mapping[int, RankTrace]) -> tuple[collections.Counter[int], dict[int, float], int]:
    """Return how often each rank came last, its delay, and the number of operations that count."""
    arrivals: dict[tuple[int, str], dict[int, Op]] = {}
    for rank, trace in ranks.items():
        for op in trace.ops:
            if op.started:
                arrivals.setdefault((op.sequence, op.name), {})[rank] = op
    last: collections.Counter[int] = collections.Counter()
    delays: dict[int, list[Span]] = {rank: [] for rank in ranks}
    known = 0
    for present in arrivals.values():
        if len(present) < 2:
            continue
        known += 1
        *_, second, latest = sorted(present, key=lambda rank: present[rank].submitted)
        last[latest] += 1
        delays[latest].append((present[second].submitted, present[latest].submitted))
    # Several operations wait for a rank at once: count overlapping waits once.
    return last, {rank: _length(_Times(spans).spans) for rank, spans in delays.items()}, known


def _tensors(ops: Sequence[Op], size: int) -> list[TensorSummary]:
    by_name: dict[str, list[Op]] = {}
    for op in ops:
        if op.started:
            by_name.setdefault(op.name, []).append(op)
    found = []
    for name, group in by_name.items():
        count = len(group)
        found.append(
            TensorSummary(
                name=name,
                count=-(-count // size),
                bytes=sum(op.bytes for op in group) // count,
                negotiate_ms=sum(op.ready - op.submitted for op in group) / count / 1000,
                queue_ms=sum(op.started - op.ready for op in group) / count / 1000,
                execute_ms=sum(op.ended - op.started for op in group) / count / 1000,
                exposed_ms=sum(op.ended - op.waited for op in group if op.waited is not None) / count / 1000,
                site=group[0].site,
            )
        )
    return sorted(found, key=lambda tensor: tensor.exposed_ms * tensor.count, reverse=True)


class _Times:
    """Spans of time; overlapping ones are merged."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans: list[Span] = []
        for begin, end in sorted(span for span in spans if span[1] > span[0]):
            if self.spans and begin <= self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], max(end, self.spans[-1][1]))
            else:
                self.spans.append((begin, end))
        self._ends = [end for _, end in self.spans]

    def within(self, limits: Span) -> list[Span]:
        """Return the parts of the spans between the limits."""
        found = []
        for index in range(bisect.bisect_right(self._ends, limits[0]), len(self.spans)):
            begin, end = self.spans[index]
            if begin >= limits[1]:
                break
            found.append((max(begin, limits[0]), min(end, limits[1])))
        return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
