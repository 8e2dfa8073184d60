"""Memberships by tables: processes that come late or by themselves, and those that do not end."""

from __future__ import annotations

import dataclasses

import pytest
from memberships import A0, A1, A2, B0, B1, ELASTIC, KILLED, do, kinds, ranks, started

from horovod.core.membership import Membership
from horovod.core.membership_events import (
    Arrived,
    Assign,
    Begin,
    Discovered,
    Dissolve,
    Ended,
    Fence,
    Finish,
    Joined,
    Left,
    Note,
    Paused,
    Policy,
    Ready,
    Refuse,
    Slot,
    Start,
    Tick,
    TrainingEnded,
    TrainingOver,
)


def test_fewer_than_the_minimum_end_the_job_after_a_while() -> None:
    members = started(dataclasses.replace(ELASTIC, minimum=3, cool_down_s=None), a=2, b=2)
    for slot in (B0, B1):
        members.handle(Ended(slot, KILLED))
    for slot in (A0, A1):
        assert members.handle(Ready(slot)) == []
    assert kinds(members.handle(Tick(599))) == [Note]
    assert kinds(members.handle(Tick(600))) == [Refuse, Refuse, Finish]


def test_the_user_hears_again_and_again_for_whom_others_wait() -> None:
    members = Membership(Policy(2, minimum=1, timeout_s=80, start_timeout_s=100))
    members.handle(Discovered({"a": 2}))
    members.handle(Tick(50))
    assert members.handle(Tick(99)) == [], "nobody waits who is not there"
    members.handle(Ready(A0))
    first = "others have waited {} s for a:1 to join them; at most 100 s (HOROVOD_START_TIMEOUT)"
    said = [members.handle(Tick(99 + seconds)) for seconds in (29, 30, 59, 60)]
    assert said == [[], [Note(first.format(30))], [], [Note(first.format(60))]]
    for event in (Ready(A1), Joined(A0, 1), Joined(A1, 1)):
        members.handle(event)
    assert members.handle(Tick(1000)) == [], "nobody waits in a step"
    members.handle(Ready(A1, 5))
    later = Note("others have waited 30 s for a:0 to join them; at most 80 s (HOROVOD_ELASTIC_TIMEOUT)")
    assert members.handle(Tick(1030)) == [later]


def test_a_member_that_does_not_come_is_fenced() -> None:
    members = started(dataclasses.replace(ELASTIC, cool_down_s=None), a=2, b=2)
    for slot in (A0, A1, B0):
        members.handle(Ready(slot, 5))
    (fence,) = members.handle(Tick(600))
    assert isinstance(fence, Fence)
    assert fence.slot == B1
    assert members.handle(Ready(B1, 5)) == []  # only its end is a verdict
    assert ranks(members.handle(Ended(B1, KILLED))) == [A0, A1, B0]


def test_a_killed_member_that_the_kernel_holds_is_not_waited_for_and_never_comes_back() -> None:
    members = started(dataclasses.replace(ELASTIC, cool_down_s=(0, 0)), a=2, b=2)
    for slot in (A0, A1, B0):
        members.handle(Ready(slot, 5))
    members.handle(Tick(600))
    assert members.handle(Tick(604.9)) == []
    decisions = do(members, Tick(605))
    assert ranks(decisions) == [A0, A1, B0]
    assert decisions[-1] == Begin(2, 5)
    assert members.handle(Ready(B1, 9)) == []
    assert members.handle(Ended(B1, KILLED)) == [Start(B1)]
    assert members.handle(Ended(A0)) == members.handle(Ended(A1)) == []


def test_nobody_is_fenced_where_too_few_are_left_with_it() -> None:
    members = started(dataclasses.replace(ELASTIC, minimum=4, cool_down_s=None), a=2, b=2)
    members.handle(Ended(B1, KILLED))
    for slot in (A0, A1):  # B0 is busy
        members.handle(Ready(slot, 5))
    decisions = members.handle(Tick(600))
    assert kinds(decisions) == [Refuse, Refuse, Finish]
    assert decisions[-1] == Finish("only 3 of at least 4 ranks were there within 600 s (HOROVOD_ELASTIC_TIMEOUT)")


def test_work_stands_still_from_the_first_member_on_that_waits_for_the_next_generation() -> None:
    members = started(dataclasses.replace(ELASTIC, is_discovering=False), a=4)
    members.handle(Discovered({"a": 5}))
    newcomer = Slot("a", 4)
    assert members.handle(Ready(newcomer)) == []
    assert members.handle(Ready(A1, 5)) == [Paused(1)]
    assert members.handle(Ready(A0, 5)) == []


def test_the_others_get_another_generation_when_one_does_not_join() -> None:
    members = Membership(Policy(2))
    members.handle(Discovered({"a": 2}))
    for slot in (A0, A1):
        members.handle(Ready(slot))
    members.handle(Joined(A0, 1))
    assert kinds(members.handle(Tick(600))) == [Dissolve, Fence]
    assert ranks(members.handle(Ended(A1, KILLED))) == [A0]


def test_ranks_that_cannot_meet_are_refused_and_not_killed() -> None:
    """So they can write their state: nobody knows which of them cannot reach the others."""
    members = started(dataclasses.replace(ELASTIC, cool_down_s=None), a=2, b=2)
    for slot in (A0, A1, B0, B1):
        members.handle(Ready(slot, 5))
    decisions = members.handle(Tick(600))
    assert kinds(decisions) == [Refuse] * 4 + [Finish]
    assert decisions[-1] == Finish(
        "the 4 ranks did not meet within 600 s (HOROVOD_ELASTIC_TIMEOUT); can all hosts connect to each other?"
    )


def test_the_first_generation_may_have_a_limit_of_its_own() -> None:
    members = Membership(Policy(2, minimum=2, timeout_s=5, start_timeout_s=60))
    members.handle(Discovered({"a": 2}))
    members.handle(Ready(A0))
    assert kinds(members.handle(Tick(59))) == [Note]
    assert members.handle(Tick(60))[-1] == Finish(
        "only 1 of at least 2 ranks were there within 60 s (HOROVOD_START_TIMEOUT)"
    )


def test_the_limit_of_the_first_generation_counts_until_that_has_begun() -> None:
    members = Membership(Policy(2, timeout_s=5, start_timeout_s=60))
    members.handle(Discovered({"a": 2}))
    for slot in (A0, A1):
        members.handle(Ready(slot))
    members.handle(Joined(A0, 1))
    assert members.handle(Tick(59)) == []
    late = "it did not come to init() within 60 s (HOROVOD_START_TIMEOUT), and others waited"
    assert members.handle(Tick(60))[-1] == Fence(A1, late)


@pytest.mark.parametrize("how", ["was killed by SIGKILL", ""], ids=["killed", "ended well"])
def test_processes_that_another_launcher_starts_come_by_themselves(how: str) -> None:
    """Ranks are as that launcher says, nobody is started, and a process that ends before is not waited for."""
    members = Membership(Policy(4, is_open=True))
    slots = [Slot("b", 2), Slot("a", 1), Slot("a", 0), Slot("b", 3)]
    for slot in slots:
        assert members.handle(Arrived(slot)) == []
        assert members.is_open(slot)
    assert members.handle(Ended(slots[3], how)) == []
    decisions = [members.handle(Ready(slot)) for slot in slots[:3]]
    (assign,) = decisions[2]
    assert isinstance(assign, Assign) and decisions[:2] == [[], []]
    assert {slot: at.rank for slot, at in assign.positions.items()} == {slots[2]: 0, slots[1]: 1, slots[0]: 2}
    for slot in slots[:3]:
        members.handle(Joined(slot, 1))
    late = Slot("b", 7)
    assert members.handle(Arrived(late)) == [] and members.handle(Ready(late)) == [] and members.wants_change
    assert members.handle(Ended(slots[2], "was killed by SIGKILL")) == []
    for slot in slots[:2]:
        last = members.handle(Ready(slot, 5, "same"))
    assert isinstance(last[0], Assign)
    assert {slot: at.rank for slot, at in last[0].positions.items()} == {slots[1]: 0, slots[0]: 1, late: 2}


def test_processes_of_another_launcher_that_all_fail_before_they_meet_end_the_job() -> None:
    members = Membership(Policy(2, is_open=True))
    for host in "ba":
        members.handle(Arrived(Slot(host, 0)))
        decisions = members.handle(Ended(Slot(host, 0), "was killed by SIGKILL"))
    (finish,) = decisions
    assert isinstance(finish, Finish) and "2 processes have failed; the last: slot a:0 was killed" in finish.why


def test_ranks_that_shut_down_and_begin_again_wait_for_each_other() -> None:
    """Else each of them would train alone."""
    members = started(Policy(3, 1, cool_down_s=None), a=3)
    for slot in (A0, A1):
        members.handle(Left(slot))
        assert members.handle(Ready(slot)) == []
    members.handle(Left(Slot("a", 2)))
    assert ranks(do(members, Ready(Slot("a", 2)))) == [A0, A1, Slot("a", 2)]


@pytest.mark.parametrize("event", [Ended(B0), Ended(B0, KILLED), Tick(600)])
def test_a_rank_that_does_not_begin_again_is_not_waited_for_longer(event: Ended | Tick) -> None:
    members = started(Policy(3, 1, cool_down_s=None, timeout_s=600), a=2, b=1)
    for slot in (A0, A1, B0):
        members.handle(Left(slot))
    assert members.handle(Ready(A0)) == members.handle(Ready(A1)) == members.handle(Tick(1)) == []
    late = "others have waited 599 s for b:0 to join them; at most 600 s (HOROVOD_ELASTIC_TIMEOUT)"
    assert members.handle(Tick(599)) == [Note(late)]
    assert ranks(do(members, event)) == [A0, A1]


def test_too_few_ranks_wait_for_a_lost_host_that_the_user_has_named() -> None:
    members = started(Policy(3, 3, cool_down_s=(1, 1), timeout_s=60), a=2, b=1)
    members.handle(Tick(1))
    assert kinds([*members.handle(Discovered({"a": 2})), *members.handle(Ended(B0, "was lost"))]) == []
    for slot in (A0, A1):
        assert members.handle(Ready(slot)) == []
    assert members.handle(Discovered({"a": 2, "b": 1})) == []
    assert members.handle(Tick(3)) == [Start(B0)]
    assert ranks(do(members, Ready(B0))) == [A0, A1, B0]


def test_ranks_of_withdrawn_hosts_stay_until_newcomers_can_take_their_state() -> None:
    members = started(Policy(2, minimum=1, is_discovering=True), a=2)
    assert members.handle(Discovered({"b": 1})) == [Start(B0)]
    assert not members.wants_change
    members.handle(Ended(A1, KILLED))  # so that the other one comes to init() before its heir
    assert ranks(do(members, Ready(A0, 5, "x"))) == [A0]
    assert not members.wants_change
    members.handle(Ready(B0))
    assert members.wants_change
    assert ranks(do(members, Ready(A0, 6, "x"))) == [A0, B0]
    assert members.wants_change
    members.handle(Ready(A0, 6, "x"))
    assert ranks(do(members, Ready(B0, 6, "x"))) == [B0]


def test_a_rank_may_take_its_time_after_the_training_while_spares_wait() -> None:
    members = started(Policy(2, minimum=2, spares=1), a=3)
    assert [members.handle(TrainingEnded(slot)) for slot in (A0, A1)] == [[TrainingOver(1)], []]
    assert members.handle(Ended(A1)) == []  # slot a:0 writes its model
    assert members.handle(Tick(10_000)) == []
    assert members.handle(Ended(A0)) == [Refuse(A2, "the job has ended"), Finish("")]
