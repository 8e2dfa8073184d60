"""The proof of a deadlock on paper: whenever it speaks, nobody could have gone on; and it speaks of every deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import Deadlock, PaperHandle, PaperJob, Script, play, request

from horovod.core.requests import Kind
from horovod.observe.deadlock import DeadlockWatch
from horovod.observe.queries import Blocked, RankStatus


class Answers:
    """In place of ``StatusReports``: ranks answer with what the test says they do."""

    def __init__(self, job: PaperJob) -> None:
        self.job = job
        self.waits: dict[int, PaperHandle] = {}
        self.changed: dict[int, dict[str, object]] = {}
        self.asked: list[list[int]] = []
        self.complete = True

    @staticmethod
    def name(rank: int) -> str:
        return f"rank {rank}"

    def ask(self, ranks: Iterable[int], wanted: int = 0) -> None:
        self.asked.append(list(ranks))

    def is_complete(self, ranks: Sequence[int]) -> bool:
        return self.complete

    def statuses(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        found = {}
        for rank in ranks:
            handle = self.waits.get(rank)
            if handle is not None and handle.response is not None:  # it is about to go on
                handle = None
            blocked = Blocked(handle.request, (), 0, False, 1) if handle is not None else None
            free = "" if blocked is not None else "MainThread"
            answer = RankStatus(["line"], blocked, free=free, in_flight=len(self.job.ranks[rank].pending()))
            found[rank] = msgspec.structs.replace(answer, **self.changed.get(rank, {}))
        return found


class Scene:
    """A watch that speaks after ten seconds."""

    def __init__(self, size: int = 2) -> None:
        self.job = PaperJob(size)
        self.answers = Answers(self.job)
        self.watch = DeadlockWatch(self.answers, 10.0)  # type: ignore[arg-type]
        self.seconds = 100.0

    def submits_and_waits(self, rank: int, name: str, kind: Kind = Kind.ALLREDUCE) -> None:
        self.answers.waits[rank] = self.job.submit(rank, request(name, kind))

    def after(self, seconds: float) -> list[str]:
        self.seconds += seconds
        self.job.settle()
        return self.watch.inspect(self.job.coordinator, len(self.job.log), self.seconds)


def _swapped() -> Scene:
    scene = Scene()
    scene.submits_and_waits(0, "allreduce.x")
    scene.submits_and_waits(1, "allreduce.y")
    assert scene.after(0) == []
    return scene


def test_two_orders_are_reported_after_the_time_and_no_sooner() -> None:
    scene = _swapped()
    assert scene.after(9) == []
    assert scene.answers.asked == []
    lines = scene.after(1)
    assert lines[0].startswith("Ranks 0, 1 wait for each other, and will for ever")
    assert "allreduce 'x' ()" in lines[1] and "allreduce 'y' ()" in lines[2]


def test_whatever_moves_starts_the_time_anew() -> None:
    scene = _swapped()
    scene.after(9)
    scene.job.submit(1, request("allreduce.z"))
    assert scene.after(9) == []
    assert scene.after(9) == []
    assert scene.after(1) != []


def test_the_answers_are_waited_for() -> None:
    scene = _swapped()
    scene.answers.complete = False
    assert scene.after(10) == []
    assert scene.watch.is_busy
    assert scene.after(1) == []
    scene.answers.complete = True
    assert scene.after(1) != []
    assert len(scene.answers.asked) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"free": "loader"},  # another thread may submit
        {"in_flight": 2},  # the coordinator has not seen everything yet
        {"in_flight": -1},
        {"blocked": None},
        {"failure": "it has failed"},
    ],
)
def test_no_proof_while_a_rank_may_go_on(changed: dict[str, object]) -> None:
    scene = _swapped()
    scene.answers.changed[1] = changed
    assert scene.after(10) == []
    assert not scene.watch.is_busy
    scene.answers.changed = {}
    assert scene.after(9) == []
    assert scene.after(1) != [], "it is tried again"


def test_a_second_thread_must_be_stuck_too() -> None:
    scene = Scene(3)
    scene.submits_and_waits(0, "allreduce.x")
    other = scene.job.submit(0, request("allreduce.z"))
    scene.job.submit(1, request("allreduce.z"))
    scene.submits_and_waits(1, "allreduce.y")
    scene.after(0)
    scene.answers.changed[0] = {"others": [Blocked(other.request, (), 0, False)]}
    assert scene.after(10) == [], "rank 2, which is free, may come to z"
    scene.answers.changed = {}
    assert scene.after(10) != []


def test_nobody_is_asked_while_a_rank_has_submitted_nothing() -> None:
    scene = Scene()
    scene.submits_and_waits(0, "allreduce.x")
    scene.after(0)
    assert scene.after(1000) == []
    assert scene.answers.asked == []


def test_it_can_be_switched_off() -> None:
    scene = _swapped()
    watch = DeadlockWatch(scene.answers, 0.0)  # type: ignore[arg-type]
    for seconds in (0.0, 1e6, 2e6):
        assert watch.inspect(scene.job.coordinator, 0, seconds) == []


@settings(max_examples=150, deadline=None)
@given(rng=st.randoms(use_true_random=False), size=st.integers(2, 4))
def test_it_speaks_of_every_deadlock_and_of_nothing_else(rng: random.Random, size: int) -> None:
    """Ranks do a few operations, waited for at once or in the end, in orders of their own; one may skip some, or join.

    The watch looks at every moment, and the ranks go on nevertheless, to see whether they can.
    """
    job = PaperJob(size)
    answers = Answers(job)
    watch = DeadlockWatch(answers, 1.0)  # type: ignore[arg-type]
    names = ["a", "b", "c", ""]
    spoken: list[set[int]] = []
    ended: set[int] = set()
    clock = 0.0

    def wait(rank: int, handle: PaperHandle) -> Script:
        answers.waits[rank] = handle
        yield handle
        assert all(rank not in stuck for stuck in spoken), "a rank that was said to be stuck went on"
        del answers.waits[rank]

    def script(rank: int) -> Script:
        order = rng.sample(names, rng.randint(1, len(names)))
        handles = []
        for name in order:
            handle = job.submit(rank, request(name))
            if rng.random() < 0.6:
                yield from wait(rank, handle)
            else:
                handles.append(handle)
        for handle in handles:
            yield from wait(rank, handle)
        if rng.random() < 0.5:
            yield from wait(rank, job.submit(rank, request("join", Kind.JOIN)))
        ended.add(rank)

    def look() -> None:
        nonlocal clock
        job.settle()
        for _ in range(3):
            clock += 1.0
            lines = watch.inspect(job.coordinator, len(job.log), clock)
            if lines:
                text = lines[0].partition(" wait for")[0].partition(" ")[2]
                spoken.append({int(rank) for rank in text.split(", ")})

    def choose(options: Sequence[int]) -> int:
        look()
        return rng.choice(options)

    try:
        play(job, [script(rank) for rank in range(size)], choose)
    except Deadlock:
        look()
        # A rank that waits for one that has ended learns that otherwise.
        assert spoken or ended, "all ranks wait for ever, and nobody says so"
    else:
        assert spoken == []
