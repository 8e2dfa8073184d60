"""One submission of every rank at once: the log is as if the coordinator had taken them one by one."""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import PaperJob, Script, play, request, shuffled

from horovod.core.coordinator import LogEntry
from horovod.core.requests import NO_NOTE, Kind, Request


class RoundJob(PaperJob):
    """Hands the first submissions of all ranks over together, as soon as there is one of each."""

    def __init__(self, size: int, capacity: int, signatures: int) -> None:
        super().__init__(size, capacity=capacity, signatures=signatures)
        self.taken = 0
        self._held: list[collections.deque[tuple[int, int]]] = [collections.deque() for _ in range(size)]

    def _submit(self, rank: int, signature: int, note: int) -> None:
        self._held[rank].append((signature, note))
        if all(self._held):
            signatures, notes = zip(*[held[0] for held in self._held], strict=True)
            if self.coordinator.submit_round(signatures, notes):
                self.taken += 1
                for held in self._held:
                    held.popleft()
            else:
                self._release()

    def _declare(self, rank: int, signature: int, wanted: Request) -> None:
        self._release(rank)
        super()._declare(rank, signature, wanted)

    def _release(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            while self._held[rank]:
                self.coordinator.submit(rank, *self._held[rank].popleft())

    def settle(self) -> list[LogEntry]:
        news = super().settle()
        if not news:
            self._release()
            news = super().settle()
        return news


@settings(max_examples=80)
@given(
    size=st.sampled_from([2, 3]), rng=st.randoms(use_true_random=False), capacity=st.sampled_from([1, 2, 4096]),
    signatures=st.sampled_from([2, 1024]), is_together=st.booleans(),
)  # fmt: skip
def test_rounds_answer_everything_once_in_one_order(
    size: int, rng: random.Random, capacity: int, signatures: int, is_together: bool
) -> None:
    job = RoundJob(size, capacity, signatures)
    kinds = [Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.BARRIER, Kind.ALLGATHER]
    program = [request(rng.choice(["", f"t{i}"]), rng.choice(kinds), shape=(rng.randrange(2) + 1,)) for i in range(6)]

    def script(rank: int) -> Script:
        for _ in range(4):
            handles = []
            for wanted in program if is_together else shuffled(program, rng):
                handles.append(job.submit(rank, wanted, rng.choice([NO_NOTE, 64 * rank])))
                yield handles[-1] if is_together else None
            yield from handles

    play(job, [script(rank) for rank in range(size)], rng.choice)
    job.assert_quiet()
    logs = [[(handle.request.name, handle.request.kind) for handle in me.executed] for me in job.ranks]
    assert all(log == logs[0] for log in logs)
    assert len(logs[0]) == 24
    assert not any(handle.response and handle.response.error for me in job.ranks for handle in me.executed)
    if is_together and capacity == 4096 and signatures == 1024:
        assert job.taken


def _repeated(size: int = 2) -> PaperJob:
    """Return a job whose ranks have done the same once, under signature 0."""
    job = PaperJob(size)
    for rank in range(size):
        job.submit(rank, request())
    job.settle()
    return job


def test_a_repetition_is_taken_at_once() -> None:
    coordinator = _repeated().coordinator
    assert coordinator.submit_round((0, 0), (64, 128))
    (entry,) = coordinator.take()
    assert entry.notes == (64, 128)


def _submit_another(job: PaperJob) -> None:
    job.submit(0, request("pending"))


def _join(job: PaperJob) -> None:
    job.submit(1, request("join", Kind.JOIN))


def _leave(job: PaperJob) -> None:
    job.coordinator.leave(1, "rank 1 has left")


def _redeclare(job: PaperJob) -> None:
    job.coordinator.declare(1, 0, request(shape=(5,)))


def _fail(job: PaperJob) -> None:
    job.submit(0, request())
    ((match, *_),) = job.coordinator.waiting()
    job.coordinator.fail_pending(match, "stalled", "StallError")


@pytest.mark.parametrize("change", [_submit_another, _join, _leave, _redeclare, _fail])
def test_what_is_not_a_plain_repetition_is_taken_one_by_one(change: object) -> None:
    job = _repeated()
    assert job.coordinator.submit_round((0, 0), (NO_NOTE, NO_NOTE))
    job.coordinator.take()
    assert callable(change)
    change(job)
    job.coordinator.take()
    assert not job.coordinator.submit_round((0, 0), (NO_NOTE, NO_NOTE))


def test_what_ranks_never_did_together_is_taken_one_by_one() -> None:
    job = _repeated()
    for rank in range(2):
        job.submit(rank, request("other"))
    job.settle()
    assert not job.coordinator.submit_round((0, 1), (NO_NOTE, NO_NOTE))
    assert job.coordinator.submit_round((1, 1), (NO_NOTE, NO_NOTE))
