"""Medians and ratios of measured times (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["calls_for", "mean_of_ranks", "slowest", "summarize"]


def summarize(times: Iterable[float]) -> dict[str, float]:
    """Return the median of ``times`` (at least one, seconds), the bounds of the middle 80 %, and their number."""
    measured = list(times)
    low, middle, high = (float(value) for value in np.quantile(measured, (0.1, 0.5, 0.9)))
    return {"median_s": middle, "p10_s": low, "p90_s": high, "calls": len(measured)}


def mean_of_ranks(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each call, the mean of its times on the ranks, as in the OSU benchmarks.

    In a series of calls the ranks are late in turns, and the other rank waits: of two times, one
    is too long and the other too short, and only their mean is the real time of the call.
    """
    return [sum(call) / len(call) for call in zip(*by_rank, strict=True)]


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each call, the time on the rank where it took longest."""
    return [max(call) for call in zip(*by_rank, strict=True)]


def calls_for(call_s: float, round_s: float) -> int:
    """Return the number of calls that fill a round of ``round_s`` seconds, when one takes ``call_s``."""
    return max(2, min(2000, int(round_s / max(call_s, 1e-7))))
