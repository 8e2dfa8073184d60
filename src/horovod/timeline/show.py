"""A summary of a timeline as tables for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from horovod.timeline.summary import StepSummary, Summary

__all__ = ["show"]

#: Shares of a step below this are not reported.
_NOTABLE = 0.05
_WORDS = """\
  compute  no thread waited for communication
  ranks    a thread waited, because some rank had not come yet
  data     a thread waited, though all ranks had come
  comm     the engine executed something; hidden: the share of it during compute
  last     how often the rank came last; delay: something waited for it alone"""


def show(summary: Summary, console: Console, most_steps: int = 10, most_tensors: int = 12) -> None:
    """Print a summary, with the slowest steps and the first names."""
    ranks = len(summary.ranks)
    console.print(
        f"{ranks} rank{'s' * (ranks != 1)}, {summary.operations} operations each, {summary.bytes / 1e6:.1f} MB in all"
    )
    if summary.resets:
        times = f"{summary.resets} time{'s' * (summary.resets != 1)}"
        console.print(f"The members of the job changed {times}; a rank is all processes that had its number.")
    if summary.anchor:
        console.print(f"A step begins where {summary.anchor} is submitted.", markup=False, highlight=False)
    else:
        console.print("No operation was repeated: all of it counts as one step.")
    console.print(_verdict(summary), highlight=False)
    console.print()
    console.print(_ranks(summary))
    console.print(_WORDS, highlight=False, style="dim")
    console.print()
    console.print(_steps(summary.steps, most_steps))
    console.print(_tensors(summary, most_tensors))
    for error in summary.errors:
        console.print(f"error: {error}", markup=False)


def _verdict(summary: Summary) -> str:
    """Return one sentence on the largest cost of a step besides computing."""
    step_ms = statistics.fmean(rank.mean.total_ms for rank in summary.ranks)
    data_ms = statistics.fmean(rank.mean.for_data_ms for rank in summary.ranks)
    slowest = max(summary.ranks, key=lambda rank: rank.delay_ms)
    of_step = f"ms of an average step of {step_ms:.2f} ms"
    if slowest.delay_ms >= max(data_ms, _NOTABLE * step_ms):
        return f"Rank {slowest.rank} holds the others up: for {slowest.delay_ms:.2f} {of_step} they wait for it alone."
    if data_ms >= _NOTABLE * step_ms:
        return f"For {data_ms:.2f} {of_step} communication is waited for that computing does not hide."
    return f"Little is waited for: {data_ms:.2f} {of_step} for communication."


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _ranks(summary: Summary) -> Table:
    table = _table(
        "Average step of each rank, ms",
        "rank", "step", "compute", "ranks", "data", "comm", "hidden", "last", "delay",
    )  # fmt: skip
    for rank in summary.ranks:
        step = rank.mean
        times = (step.total_ms, step.compute_ms, step.for_ranks_ms, step.for_data_ms, step.communication_ms)
        shares = (f"{step.overlap:.0%}", f"{rank.last:.0%}", f"{rank.delay_ms:.2f}")
        table.add_row(str(rank.rank), *(f"{value:.2f}" for value in times), *shares)
    return table


def _steps(steps: Sequence[StepSummary], most: int) -> Table:
    by_number: dict[int, list[StepSummary]] = {}
    for step in steps:
        by_number.setdefault(step.number, []).append(step)
    longest = {number: max(step.total_ms for step in group) for number, group in by_number.items()}
    chosen = sorted(sorted(longest, key=lambda number: longest[number], reverse=True)[:most])
    middle = statistics.median(longest.values()) if longest else 0.0
    table = _table(
        f"The {len(chosen)} slowest of {len(longest)} steps, ms, average of the ranks (median {middle:.2f})",
        "step", "at", "took", "compute", "ranks", "data", "hidden", "slowest rank",
    )  # fmt: skip
    for number in chosen:
        group = by_number[number]
        busiest = max(group, key=lambda step: step.compute_ms)
        means = [
            statistics.fmean(getattr(step, name) for step in group)
            for name in ("compute_ms", "for_ranks_ms", "for_data_ms")
        ]
        table.add_row(
            str(number),
            f"{group[0].begin_ms:.1f}",
            f"{longest[number]:.2f}",
            *(f"{value:.2f}" for value in means),
            f"{statistics.fmean(step.overlap for step in group):.0%}",
            f"rank {busiest.rank}: {busiest.compute_ms:.2f}",
        )
    return table


def _tensors(summary: Summary, most: int) -> Table:
    shown = summary.tensors[:most]
    more = len(summary.tensors) - len(shown)
    title = "Tensors, the one that was waited for most first; ms each time" + (f" ({more} more)" if more else "")
    table = _table(title)
    table.add_column("tensor", overflow="ellipsis", no_wrap=True)
    for heading in ("times", "kB", "negotiate", "queue", "execute", "GB/s", "wait"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tensor in shown:
        rate = tensor.bytes / tensor.execute_ms / 1e6 if tensor.execute_ms else 0.0
        times = (tensor.negotiate_ms, tensor.queue_ms, tensor.execute_ms)
        table.add_row(
            tensor.name,
            str(tensor.count),
            f"{tensor.bytes / 1e3:.1f}",
            *(f"{value:.3f}" for value in times),
            f"{rate:.2f}",
            f"{tensor.exposed_ms:.3f}",
        )
    return table
