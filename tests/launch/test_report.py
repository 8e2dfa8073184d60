"""Exit codes and the words of the report, from made-up outcomes."""

from __future__ import annotations

import signal

import pytest

from horovod.launch.plan import LaunchPlan
from horovod.launch.report import Exit, Outcome, exit_code, report

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
PLAN = LaunchPlan(("x",), "box", {}, ({}, {}, {}))
WELL = [Exit(r, 100 + r, 0) for r in range(3)]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(WELL), 0),
        (Outcome([Exit(1, 101, 3), Exit(0, 100, 1)]), 3),
        (Outcome([Exit(0, 100, 0), Exit(1, 101, -9), Exit(2, 102, 1)]), 137),
        (Outcome([Exit(1, 101, -11)]), 139),
        (Outcome([Exit(1, 101, 3)], interrupted=2), 130),
        (Outcome(WELL, interrupted=15), 143),
        (Outcome([], error="broken"), 1),
    ],
)
def test_exit_code_is_that_of_the_first_failure(outcome: Outcome, code: int) -> None:
    assert exit_code(outcome) == code


def test_nothing_to_say_when_all_went_well() -> None:
    assert report(PLAN, Outcome(WELL)) == []


def test_first_failure_first_then_one_line_for_each_other_rank() -> None:
    exits = [Exit(1, 101, 3), Exit(2, 102, -TERM, TERM), Exit(0, 100, 0)]
    assert report(PLAN, Outcome(exits, tails={1: ["a" * 2001, "b" * 2000], 2: ["c"]})) == [
        "rank 1 on box (pid 101) failed with exit code 3",
        "the last lines of rank 1's stderr:",
        f"    {'a' * 2000} [...]",
        f"    {'b' * 2000}",
        "rank 0 (pid 100): ended well",
        "rank 2 (pid 102): ended by horovodrun with SIGTERM",
    ]


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Exit(2, 102, -TERM, TERM), "ended by horovodrun with SIGTERM"),
        (Exit(2, 102, -KILL, KILL), "ended by horovodrun with SIGKILL after it ignored SIGTERM"),
        (Exit(2, 102, 1), "failed with exit code 1"),
        (Exit(2, 102, -6), "was killed by SIGABRT"),
        (Exit(2, 102, -40), "was killed by signal 40"),
        (Exit(2, 102, 137), "failed with exit code 137 (SIGKILL in a command that it ran)"),
    ],
)
def test_words_for_each_way_to_end(ended: Exit, said: str) -> None:
    lines = report(PLAN, Outcome([Exit(1, 101, 3), ended]))
    assert lines[-1] == f"rank 2 (pid 102): {said}"


def test_ranks_of_a_large_job_that_ended_alike_share_a_line() -> None:
    plan = LaunchPlan(("x",), "box", {}, ({},) * 9)
    exits = [Exit(0, 100, 0), Exit(1, 101, 3), *(Exit(rank, 100 + rank, -TERM, TERM) for rank in (2, 3, 4, 6, 7))]
    assert report(plan, Outcome(exits))[1:] == [
        "rank 0 (pid 100): ended well, before rank 1 failed",
        "ranks 2, 3, 4, 6, 7: each ended by horovodrun with SIGTERM",
        "ranks 5, 8: each was never started",
    ]


def test_a_rank_that_left_early_may_be_the_reason() -> None:
    exits = [Exit(2, 102, 0), Exit(1, 101, 1), Exit(0, 100, 0)]
    assert report(PLAN, Outcome(exits))[1:] == [
        "rank 0 (pid 100): ended well",
        "rank 2 (pid 102): ended well, before rank 1 failed",
    ]


def test_a_rank_that_never_ran() -> None:
    assert "rank 2: was never started" in report(PLAN, Outcome([Exit(0, 100, 1), Exit(1, 101, 1)]))


@pytest.mark.parametrize(
    ("status", "kills", "said"), [(-9, 1, True), (137, 2, True), (-9, 0, False), (-11, 1, False), (1, 1, False)]
)
def test_memory_is_blamed_only_when_the_kernel_says_so(status: int, kills: int, said: bool) -> None:
    assert ("probably out of memory" in report(PLAN, Outcome([Exit(1, 101, status)]), kills)[0]) is said


def test_interrupt_is_one_line() -> None:
    exits = [Exit(r, 100 + r, -TERM, TERM) for r in range(3)]
    assert report(PLAN, Outcome(exits, interrupted=2)) == [
        "SIGINT received; ended 3 of 3 ranks, nothing is left running"
    ]


def test_trouble_of_the_launcher_comes_first() -> None:
    assert report(PLAN, Outcome([Exit(0, 100, -9)], error="broken"))[:2] == [
        "broken",
        "rank 0 on box (pid 100) was killed by SIGKILL",
    ]


def test_an_interrupt_counts_ranks_whose_end_nobody_reported() -> None:
    assert report(PLAN, Outcome([Exit(0, 100, 0)], error="no answer", interrupted=2)) == [
        "no answer",
        "SIGINT received; ended 2 of 3 ranks, nothing is left running",
    ]
