"""Decisions of the job service about hosts that come, give up, fail or end, as tables."""

from __future__ import annotations

import pytest

from horovod._version import __version__
from horovod.rendezvous.meetings import EXPIRY_S, Meetings
from horovod.rendezvous.protocol import AllHere, Failed, GiveUp, HostEntry, Join, Refusal, StillMissing


def join(
    ranks: list[int], nonce: bytes = b"", size: int = 4, run: str = "", members: tuple[int, ...] = ()
) -> Join:  # fmt: skip
    entry = HostEntry(f"host{ranks[0]}", ranks, [rank + 100 for rank in ranks], __version__)
    return Join(1, size, nonce or bytes(ranks), entry, ["tcp://here:1"] if 0 in ranks else [], run, members)


@pytest.fixture
def met() -> Meetings:
    """Two hosts of two ranks that are complete."""
    meetings = Meetings()
    assert meetings.join(b"a", join([0, 1]), 0.0) == [(b"a", StillMissing("ranks 2, 3"))]
    told = dict(meetings.join(b"b", join([2, 3]), 0.0))
    assert [type(told[leader]) for leader in (b"a", b"b")] == [AllHere, AllHere]
    return meetings


def test_a_lost_answer_is_repeated(met: Meetings) -> None:
    [(receiver, answer)] = met.join(b"a", join([0, 1]), 1.0)
    assert receiver == b"a" and isinstance(answer, AllHere)


def test_a_leader_that_gives_up_while_all_connect_is_told_to_the_others(met: Meetings) -> None:
    assert met.leave(GiveUp(1, bytes([2, 3]), Refusal("no route", 3))) == []
    assert met.join(b"a", join([0, 1]), 1.0) == [(b"a", Refusal("no route", 3))]
    # Another attempt begins with another nonce.
    assert met.join(b"a", join([0, 1], b"again"), 2.0) == [(b"a", StillMissing("ranks 2, 3"))]


def test_a_rank_that_ends_while_all_connect_is_told(met: Meetings) -> None:
    assert met.ended(2, "rank 2 (pid 102) on host b", "was killed by SIGKILL") == []
    told = Refusal("rank 2 (pid 102) on host b was killed by SIGKILL before its init() was done", 2)
    assert met.join(b"a", join([0, 1]), 1.0) == [(b"a", told)]


def test_ranks_of_a_part_of_the_job_are_known_by_their_numbers_in_the_whole() -> None:
    meetings = Meetings()
    part = join([0], size=2, run="#1,3", members=(1, 3))
    assert meetings.join(b"a", part, 0.0) == [(b"a", StillMissing("rank 1"))]
    assert meetings.ended(2, "rank 2", "ended") == []
    [(_, told)] = meetings.ended(3, "rank 3", "ended with exit code 0")
    assert told == Refusal("rank 3 ended with exit code 0 before its init() was done", 1)


def test_a_host_that_fails_is_told_to_each_host_once_and_another_attempt_may_follow() -> None:
    meetings = Meetings()
    meetings.join(b"a", join([0, 1], size=5), 0.0)
    told = Refusal("rank 4 has ended", is_loss=True)
    failed = Failed(1, 5, 1, told)
    assert meetings.failed(b"c", failed) == [(b"a", told), (b"c", told)]
    assert meetings.has_to_tell
    assert meetings.join(b"b", join([2, 3], size=5), 0.0) == [(b"b", told)]
    assert not meetings.has_to_tell
    assert meetings.join(b"a", join([0, 1], b"again", 5), 0.0) == [(b"a", StillMissing("ranks 2, 3, 4"))]


def test_a_leader_that_stops_repeating_itself_is_forgotten() -> None:
    meetings = Meetings()
    meetings.join(b"a", join([0, 1], size=5), 0.0)
    answers = meetings.join(b"b", join([2, 3], size=5), EXPIRY_S + 1)
    assert answers == [(b"b", StillMissing("ranks 0, 1, 4"))]
