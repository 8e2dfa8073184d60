"""Collectives of all contenders in alternating rounds: A B C A B C …, so that all see the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.bench.cases import Case
from horovod.bench.control import Agreement, Contender, Tell
from horovod.bench.host import available_bytes
from horovod.bench.stats import calls_for, summarize
from horovod.phrases import format_bytes

__all__ = ["run_cases"]


def run_cases(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    control: Agreement,
    tell: Tell,
    *,
    rounds: int = 7,
    round_s: float = 0.05,
) -> list[dict[str, Any]]:
    """Measure every case with every contender, in turns of about ``round_s``; called on all ranks, in step. Return one
    row per case; rank 0's is the result.
    """
    rows = []
    steps = len(cases) * (rounds + 1)
    for number, case in enumerate(cases):
        what = f"{case.op} {format_bytes(case.nbytes)} {case.dtype}"
        done = number * (rounds + 1)
        tell(done, steps, what)
        active, skipped = _prepare(case, contenders, control)
        calls = {each.name: _calibrate(each, control, round_s) for each in active}
        times: dict[str, list[float]] = {each.name: [] for each in active}
        for turn in range(rounds):
            tell(done + 1 + turn, steps, what)
            for each in active:
                spent = each.measure(calls[each.name])
                times[each.name] += spent
                calls[each.name] = control.broadcast(calls_for(min(spent, default=1.0), round_s))
        for each in active:
            each.release()
            skipped |= _reason(each, case, control)
        samples = {name: summarize(spent) for name, spent in times.items() if spent}
        rows.append(_row(case, samples, skipped))
    tell(steps, steps, "done")
    return rows


def _reason(contender: Contender, case: Case, control: Agreement) -> dict[str, str]:
    reason = control.broadcast(contender.why_not(case))
    return {contender.name: reason} if reason else {}


def _prepare(case: Case, contenders: Sequence[Contender], control: Agreement) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders for ``case``, ready to be timed, and why the others are skipped."""
    skipped: dict[str, str] = {}
    needed = case.memory_bytes(control.size) * control.size * len(contenders)
    free = control.broadcast(available_bytes())
    if free and needed > 0.7 * free:
        reason = f"needs {format_bytes(needed)} of memory, {format_bytes(free)} is free"
        return [], {each.name: reason for each in contenders}
    active = []
    for each in contenders:
        why_not = _reason(each, case, control)
        if not why_not:
            each.prepare(case)
            why_not = _reason(each, case, control)
        skipped |= why_not
        if not why_not:
            active.append(each)
    return active, skipped


def _calibrate(contender: Contender, control: Agreement, round_s: float) -> int:
    """Warm up, and choose the number of calls of a round from their time; the same on all ranks."""
    contender.measure(1)
    warm = contender.measure(3)
    return control.broadcast(calls_for(min(warm, default=1.0), round_s))


def _row(case: Case, samples: dict[str, dict[str, float]], skipped: dict[str, str]) -> dict[str, Any]:
    medians = {name: sample["median_s"] for name, sample in samples.items()}
    ours = [name for name in medians if name.startswith("horovod")]
    peers = {name: spent for name, spent in medians.items() if name not in ours}
    return {
        "op": case.op,
        "nbytes": case.nbytes,
        "dtype": case.dtype,
        "batch": case.batch,
        "results": samples,
        "ratios": {us: {name: spent / medians[us] for name, spent in peers.items()} for us in ours},
        "skipped": skipped,
    }
