"""Medians and ratios of measured times (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Sample", "calls_for", "mean_of_ranks", "slowest", "summarize"]


@dataclass(frozen=True)
class Sample:
    """Median and spread of many timings of one thing.

    Attributes:
        median_s: the figure; seconds.
        p10_s: a tenth of the calls were faster.
        p90_s: a tenth of the calls were slower.
        calls: how many calls were timed.
    """

    median_s: float
    p10_s: float
    p90_s: float
    calls: int

    def to_json(self) -> dict[str, float]:
        """This sample as plain numbers."""
        return {"median_s": self.median_s, "p10_s": self.p10_s, "p90_s": self.p90_s, "calls": self.calls}


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(times: Iterable[float]) -> Sample:
    """Median and spread of ``times`` (at least one, seconds)."""
    ordered = sorted(times)
    if not ordered:
        raise ValueError("nothing was timed")
    return Sample(_quantile(ordered, 0.5), _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered))


def mean_of_ranks(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each call, the mean of its times on the ranks, as the OSU benchmarks have it.

    In a row of calls the ranks take turns at being late, and the other one waits: of a pair of times
    one is too long and the other too short, and only their mean is the time that a call really takes.
    """
    return [sum(call) / len(call) for call in zip(*by_rank, strict=True)]


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each call, the time on the rank that it took longest on."""
    return [max(call) for call in zip(*by_rank, strict=True)]


def calls_for(call_s: float, round_s: float, *, least: int = 2, most: int = 2000) -> int:
    """How many calls fill a round of ``round_s`` seconds, when one takes ``call_s``."""
    return max(least, min(most, int(round_s / max(call_s, 1e-7))))
