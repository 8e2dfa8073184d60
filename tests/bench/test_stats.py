"""Medians, spreads, and how many calls make a round."""

from __future__ import annotations

import pytest

from horovod.bench.stats import calls_for, mean_of_ranks, slowest, summarize


def test_summary_is_the_median_and_the_tenths() -> None:
    sample = summarize([float(value) for value in range(11)])
    assert sample == {"median_s": 5.0, "p10_s": 1.0, "p90_s": 9.0, "calls": 11}


def test_the_time_of_a_call_is_the_mean_over_ranks() -> None:
    assert mean_of_ranks([[1.0, 5.0], [2.0, 3.0]]) == [1.5, 4.0]


def test_a_step_took_as_long_as_on_its_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


@pytest.mark.parametrize(("call_s", "calls"), [(0.01, 5), (1.0, 2), (0.0, 2000), (1e-5, 2000), (1e-4, 500)])
def test_calls_fill_a_round_within_bounds(call_s: float, calls: int) -> None:
    assert calls_for(call_s, 0.05) == calls
