"""Memberships by tables: which decisions follow from which events."""

from __future__ import annotations

import dataclasses
import random

import pytest
from memberships import A0, A1, A2, B0, B1, ELASTIC, KILLED, do, kinds, ranks, started

from horovod.core.membership import Membership
from horovod.core.membership_events import (
    Assign,
    Begin,
    Discovered,
    Dissolve,
    Ended,
    Finish,
    Joined,
    Leaving,
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


def test_the_first_generation_has_the_ranks_of_the_hosts_in_their_order() -> None:
    members = Membership(Policy(4))
    assert members.handle(Discovered({"a": 3, "b": 2})) == [Start(A0), Start(A1), Start(A2), Start(B0)]
    for slot in (B0, A2, A1):
        assert members.handle(Ready(slot)) == []
    (assign,) = members.handle(Ready(A0))
    assert isinstance(assign, Assign)
    assert {s: p[:5] for s, p in assign.positions.items()} == {
        A0: (0, 0, 3, 0, 2), A1: (1, 1, 3, 0, 1), A2: (2, 2, 3, 0, 1), B0: (3, 0, 1, 1, 2),
    }  # fmt: skip
    for slot in (A0, A1, A2):
        assert members.handle(Joined(slot, 1)) == []
    assert members.handle(Joined(B0, 1)) == [Begin(1, 0)]


def test_a_loss_before_all_have_joined_gives_another_generation() -> None:
    members = Membership(dataclasses.replace(ELASTIC, maximum=4))
    members.handle(Discovered({"a": 2, "b": 2}))
    for slot in (A0, A1, B0, B1):
        decisions = members.handle(Ready(slot))
    assert ranks(decisions) == [A0, A1, B0, B1]
    members.handle(Joined(A1, 1))
    decisions = members.handle(Ended(A0, KILLED))
    assert decisions[0] == Dissolve(1)
    assert ranks(decisions) == [A1, B0, B1]
    assert members.handle(Joined(A1, 1)) == []  # news of an earlier generation
    for slot in (B0, B1):
        members.handle(Joined(slot, 2))
    assert members.handle(Joined(A1, 2)) == [Begin(2, 0)]


def test_survivors_that_are_furthest_come_first_and_hosts_stay_together() -> None:
    members = started(ELASTIC, a=3, b=2)
    members.handle(Ended(A0, KILLED))
    members.handle(Ready(A1, 6, "x"))
    members.handle(Ready(A2, 7, "y"))
    members.handle(Ready(B0, 7, "z"))
    decisions = members.handle(Ready(B1, 7, "z"))
    assert ranks(decisions) == [B0, B1, A2, A1]  # most of those that are furthest have state z
    (assign,) = (d for d in decisions if isinstance(d, Assign))
    assert [p.is_behind for p in assign.positions.values()] == [False, False, True, True]


def test_the_order_is_stable_where_all_are_equally_far() -> None:
    members = started(ELASTIC, b=2, a=3)
    members.handle(Ended(B0, KILLED))
    for slot in (A2, A1, B1):
        members.handle(Ready(slot, 3, "x"))
    assert ranks(members.handle(Ready(A0, 3, "x"))) == [B1, A0, A1, A2]


def test_a_spare_is_admitted_at_the_next_boundary() -> None:
    members = started(ELASTIC, a=2, b=2)
    before = members.wants_change
    assert members.handle(Discovered({"a": 3, "b": 2})) == [Start(A2)]
    assert members.handle(Ready(A2)) == []
    assert (before, members.wants_change) == (False, True)
    for slot in (A0, A1, B0):
        assert members.handle(Ready(slot, 5, "x")) == [Paused(1)] * (slot == A0)
    assert ranks(members.handle(Ready(B1, 5, "x"))) == [A0, A1, A2, B0, B1]


def test_processes_of_a_withdrawn_host_are_refused_at_the_next_boundary() -> None:
    members = started(ELASTIC, a=2, b=2)
    members.handle(Discovered({"b": 2}))
    assert members.wants_change
    for slot in (A0, A1, B0):
        members.handle(Ready(slot, 5))
    decisions = members.handle(Ready(B1, 5))
    assert kinds(decisions) == [Refuse, Refuse, Assign]
    assert ranks(decisions) == [B0, B1]


def test_a_host_is_used_again_when_it_has_cooled_down() -> None:
    members = started(dataclasses.replace(ELASTIC, maximum=4), a=2, b=2)
    now_s = 0.0
    for since_s, wait_s in ((0, 10), (59, 20), (59, 40), (59, 40), (61, 10), (0, 20)):
        now_s += since_s
        assert members.handle(Tick(now_s)) == []
        rests = Note(f"no process is started on b for {wait_s} s, as others failed there")
        assert members.handle(Ended(B1, KILLED)) == [rests]
        assert members.handle(Tick(now_s + wait_s - 1)) == []
        now_s += wait_s
        assert members.handle(Tick(now_s)) == [Start(B1)]


def test_too_few_slots_end_a_job_at_once_if_there_will_be_no_others() -> None:
    members = started(Policy(2, minimum=2), a=2)
    members.handle(Ended(A1, KILLED))
    assert members.handle(Ready(A0))[-1] == Finish("fewer than 2 slots are left; slot a:1 was killed by SIGKILL")


def test_resets_have_a_limit() -> None:
    members = started(dataclasses.replace(ELASTIC, resets=1, cool_down_s=None), a=2, b=2)
    for lost, rest in ((B1, (A0, A1, B0)), (B0, (A0, A1))):
        members.handle(Ended(lost, KILLED))
        for slot in rest:
            decisions = do(members, Ready(slot))
    assert decisions[-1] == Finish("the job has reached its limit of resets, 1")


def test_a_job_that_has_ended_well_starts_nothing_more() -> None:
    members = started(ELASTIC, a=2, b=2)
    assert members.handle(Ended(A0)) == []
    assert members.handle(Discovered({"a": 2, "b": 2, "c": 8})) == []
    for slot in (A1, B0):
        assert members.handle(Ended(slot)) == []
    assert members.handle(Ended(B1)) == [Finish("")]


def test_spares_are_those_that_were_started_last_and_take_the_place_of_the_lost() -> None:
    members = Membership(Policy(2, spares=1))
    assert members.handle(Discovered({"a": 3})) == [Start(A0), Start(A1), Start(A2)]
    assert members.handle(Ready(A2)) == members.handle(Ready(A1)) == []
    assert ranks(do(members, Ready(A0))) == [A0, A1]
    assert not members.wants_change  # A2 waits
    members.handle(Ended(A0, KILLED))
    (assign,) = (d for d in members.handle(Ready(A1, 5, "x")) if isinstance(d, Assign))
    assert list(assign.positions) == [A1, A2]
    assert [(p.previous, p.is_behind) for p in assign.positions.values()] == [(1, False), (-1, True)]


def test_a_spare_replaces_one_that_never_came_to_its_first_init() -> None:
    members = Membership(Policy(2, spares=1))
    members.handle(Discovered({"a": 3}))
    members.handle(Ready(A2))
    members.handle(Ready(A1))
    assert ranks(members.handle(Ended(A0, KILLED))) == [A1, A2]


def test_a_member_that_wants_to_leave_is_dismissed_at_the_next_boundary() -> None:
    members = started(ELASTIC, a=2, b=2)
    assert members.handle(Leaving(B0)) == []
    assert members.wants_change
    for slot in (A0, B0, B1):
        assert members.handle(Ready(slot, 5, "x")) == [Paused(1)] * (slot == A0)
    decisions = do(members, Ready(A1, 5, "x"))
    assert decisions[0] == Refuse(B0, "it asked to leave", is_dismissal=True)
    assert ranks(decisions) == [A0, A1, B1]
    assert not members.wants_change
    members.handle(Tick(100))
    assert members.handle(Ended(B0)) == []  # no success of the job, and its host is not used for a while
    assert members.handle(Tick(109)) == []
    assert members.handle(Tick(110)) == [Start(B0)]


def test_a_job_whose_ranks_were_all_asked_to_leave_ends_so_that_they_can_write_their_state() -> None:
    members = started(dataclasses.replace(ELASTIC, size=3, minimum=3), a=3)
    for slot in (A0, A1, A2):
        assert members.handle(Leaving(slot)) == []
    assert members.handle(Ready(A0, 5, "x")) == [Paused(1)]
    assert members.handle(Ready(A1, 5, "x")) == []
    why = "all ranks were asked to leave, or their hosts were withdrawn"
    assert members.handle(Ready(A2, 5, "x")) == [*(Refuse(slot, why) for slot in (A0, A1, A2)), Finish(why)]


def test_those_that_leave_hand_over_their_state_to_newcomers_first() -> None:
    members = started(Policy(2, is_discovering=True), a=2)
    assert members.handle(Discovered({"b": 2})) == [Start(B0), Start(B1)]
    for slot in (B0, B1):
        assert members.handle(Ready(slot)) == []
    members.handle(Ready(A0, 5, "x"))
    assert ranks(do(members, Ready(A1, 5, "x"))) == [A0, A1, B0, B1]
    assert members.wants_change
    for slot in (A0, A1, B0, B1):
        decisions = do(members, Ready(slot, 5, "x"))
    assert ranks(decisions) == [B0, B1]
    assert [p.previous for p in decisions[2].positions.values()] == [2, 3]  # type: ignore[union-attr]


def test_newcomers_do_not_begin_anew_when_all_that_had_the_state_are_lost() -> None:
    members = started(Policy(2, spares=1), a=3)
    members.handle(Ended(A0, KILLED))
    assert kinds(members.handle(Ended(A1, KILLED))) == [Refuse, Finish]


def test_a_newcomer_without_the_state_of_the_others_does_not_begin_anew() -> None:
    members = started(dataclasses.replace(ELASTIC, is_discovering=False, minimum=1, cool_down_s=(0, 0)), a=2)
    assert members.handle(Ended(A1, KILLED)) == [Start(A1)]
    members.handle(Ready(A0, 5, "x"))
    assert ranks(do(members, Ready(A1))) == [A0, A1]
    members.handle(Ended(A0, KILLED))
    assert members.handle(Ready(A1, -1))[-1] == Finish(
        "no process is left that has the state of the job; slot a:0 was killed by SIGKILL"
    )


def test_spares_do_not_begin_anew_when_the_members_have_left_and_end_well() -> None:
    members = started(dataclasses.replace(ELASTIC, size=2, minimum=1, maximum=2, spares=1), a=3)
    for slot in (A0, A1):
        assert not any(isinstance(d, Assign) for d in members.handle(Left(slot)))
    assert not any(isinstance(d, Assign) for d in members.handle(Tick(ELASTIC.timeout_s * 3)))
    assert members.handle(Ended(A0)) == []
    assert members.handle(Ended(A1))[-1] == Finish("")


def test_a_newcomer_that_is_too_late_does_not_spoil_the_success_of_the_others() -> None:
    members = started(Policy(2, minimum=2, spares=1), a=3)
    assert members.handle(Left(A0)) == members.handle(Left(A1)) == members.handle(Ended(A0)) == []
    assert members.handle(Ended(A1)) == [Refuse(A2, "the job has ended"), Finish("")]


def test_a_rank_that_takes_a_while_to_end_is_replaced_though_the_others_are_too_few() -> None:
    members = started(Policy(2, minimum=2, cool_down_s=(0, 0)), a=2)
    assert members.handle(Left(A1)) == []
    assert kinds(members.handle(Ready(A0, 5, "x"))) == []
    assert members.handle(Ended(A1, "exited with code 1")) == [Start(A1)]
    assert ranks(do(members, Ready(A1))) == [A0, A1]


def test_a_former_member_that_fails_late_does_not_spoil_the_success_of_the_others() -> None:
    members = started(dataclasses.replace(ELASTIC, size=3, minimum=2, maximum=3), a=3)
    members.handle(Left(A2))  # it takes a while to end, while the others go on
    do(members, Ready(A0))
    assert ranks(do(members, Ready(A1))) == [A0, A1]
    members.handle(Ended(A2, "ended with exit code 1"))
    assert members.handle(Ended(A0)) == []
    assert members.handle(Ended(A1))[-1] == Finish("")


@pytest.mark.parametrize("is_early", [True, False], ids=["before it ends", "after it has ended"])
def test_exit_code_0_is_a_loss_if_the_others_go_on(is_early: bool) -> None:
    members = started(dataclasses.replace(ELASTIC, size=3, minimum=2, maximum=3, cool_down_s=(1, 1)), a=3)
    for event in (Ready(A0, 5), Ended(A1)) if is_early else (Ended(A1), Ready(A0, 5)):
        assert not [d for d in members.handle(event) if isinstance(d, Assign | Start)]
    assert ranks(do(members, Ready(A2, 5))) == [A0, A2]
    assert members.handle(Tick(1)) == [Start(A1)]
    members.handle(Ready(A1))
    assert members.wants_change


def test_exit_code_0_of_a_former_member_is_a_loss() -> None:
    members = started(dataclasses.replace(ELASTIC, size=3, minimum=2, maximum=3, cool_down_s=(1, 1)), a=3)
    for event in (Left(A1), Ready(A0, 5), Ready(A2, 5)):
        decisions = do(members, event)
    assert ranks(decisions) == [A0, A2]
    assert members.handle(Ended(A1)) == []
    assert members.handle(Tick(1)) == [Start(A1)]


def test_a_trained_member_has_ended_well_though_another_is_lost_then() -> None:
    members = started(dataclasses.replace(ELASTIC, size=3, minimum=1, maximum=3, cool_down_s=(1, 1)), a=3)
    assert members.handle(TrainingEnded(A1)) == [TrainingOver(1)]
    for event in (Ended(A1), Ended(A2, KILLED)):
        members.handle(event)
    assert ranks(do(members, Ready(A0, 5))) == [A0]
    assert members.handle(Tick(1)) == []
    assert members.handle(Ended(A0)) == [Finish("")]


def test_a_member_that_is_left_alone_after_the_training_does_not_wait_for_newcomers() -> None:
    members = started(Policy(2, minimum=2, maximum=2, spares=1, cool_down_s=(1, 1)), a=3)
    members.handle(TrainingEnded(A1))
    assert members.handle(Ready(A0, 5)) == [Paused(1)]
    few = "fewer than 2 slots are left"
    assert members.handle(Ended(A1)) == [Refuse(A2, few), Refuse(A0, few), Finish(few)]


def test_spares_are_told_when_the_job_has_ended_well() -> None:
    members = started(Policy(2, spares=1), a=3)
    assert members.handle(Ended(A1)) == []
    assert members.handle(Ended(A0)) == [Refuse(A2, "the job has ended"), Finish("")]


def test_a_rank_in_a_generation_that_never_began_is_no_former_rank() -> None:
    members = Membership(dataclasses.replace(ELASTIC, maximum=4))
    members.handle(Discovered({"a": 2, "b": 2}))
    for slot in (A0, A1, B0, B1):
        members.handle(Ready(slot))
    (assign,) = (d for d in members.handle(Ended(A0, KILLED)) if isinstance(d, Assign))
    assert [p.previous for p in assign.positions.values()] == [-1, -1, -1]
    assert [p.is_behind for p in assign.positions.values()] == [False, True, True]


def test_a_script_that_cannot_begin_is_not_started_for_ever() -> None:
    members = Membership(Policy(2, cool_down_s=(0, 0)))
    members.handle(Discovered({"a": 2}))
    assert members.handle(Ended(A0, "exited with code 1")) == [Start(A0)]
    (finish,) = members.handle(Ended(A0, "exited with code 1"))
    assert isinstance(finish, Finish)
    assert "no generation has begun, and 2 processes have failed" in finish.why


@pytest.mark.slow
def test_512_slots_survive_a_hundred_losses_and_joins() -> None:
    rng = random.Random(0)
    policy = Policy(512, minimum=2, cool_down_s=(1, 1))
    members = started(policy, **{f"h{i}": 8 for i in range(64)})
    slots = [Slot(f"h{i}", j) for i in range(64) for j in range(8)]
    for step in range(100):
        lost = rng.choice(slots)
        do(members, Ended(lost, KILLED))
        for slot in slots:
            if slot != lost:
                decisions = do(members, Ready(slot, step))
        assert len(ranks(decisions)) == 511
        assert do(members, Tick(10.0 * step + 5)) == [Start(lost)]
        do(members, Ready(lost))
        assert members.wants_change
        for slot in slots:
            if slot != lost:
                decisions = do(members, Ready(slot, step))
        assert len(ranks(decisions)) == 512
        assert next(iter(ranks(decisions))) != lost


def test_a_host_that_is_lost_before_the_ranks_have_met_is_not_waited_for() -> None:
    members = Membership(Policy(3, minimum=2, cool_down_s=(1, 1)))
    members.handle(Discovered({"a": 2, "b": 1}))
    for slot in (A0, A1):
        assert members.handle(Ready(slot)) == []
    assert members.handle(Discovered({"a": 2})) == []
    assert ranks(members.handle(Ended(B0, "was lost with its host"))) == [A0, A1]
    for slot in (A0, A1):
        members.handle(Joined(slot, 1))
    assert members.handle(Discovered({"a": 2, "b": 1})) == []
    assert members.handle(Tick(1)) == [Start(B0)]


def test_a_process_whose_slot_was_withdrawn_does_not_count_as_one_of_the_first() -> None:
    members = Membership(Policy(2, 1, 4, is_discovering=True))
    members.handle(Discovered({"a": 3}))
    members.handle(Discovered({"a": 2}))
    for slot in (A2, A1):
        assert members.handle(Ready(slot, 0, "the same")) == []
    refuse, assign = members.handle(Ready(A0, 0, "the same"))
    assert (type(refuse), refuse.slot) == (Refuse, A2)
    assert isinstance(assign, Assign) and set(assign.positions) == {A0, A1}


def test_a_process_that_fails_before_the_ranks_have_met_is_replaced_first() -> None:
    members = Membership(Policy(3, minimum=2, cool_down_s=(1, 1)))
    members.handle(Discovered({"a": 2, "b": 1}))
    for slot in (A0, A1):
        members.handle(Ready(slot))
    assert members.handle(Ended(B0, KILLED)) == []
    assert members.handle(Tick(1)) == [Start(B0)]
    assert ranks(members.handle(Ready(B0))) == [A0, A1, B0]


def test_after_the_training_a_loss_is_not_repaired_and_is_the_result() -> None:
    members = started(ELASTIC, a=4)
    assert members.handle(TrainingEnded(A0)) == [TrainingOver(1)]
    assert members.handle(TrainingEnded(A1)) == []
    assert members.handle(Ended(A1, KILLED)) == []
    assert members.handle(Tick(100)) == [], "nothing is started, and nobody is fenced that works alone"
    members.handle(Tick(10_000))
    assert not members.wants_change
    for number in (0, 2):
        assert members.handle(Ended(Slot("a", number))) == []
    assert members.handle(Ended(Slot("a", 3))) == [
        Finish("slot a:1 was killed by SIGKILL, after the training had ended")
    ]


def test_another_training_of_the_same_processes_is_repaired_again() -> None:
    members = started(ELASTIC, a=4)
    for number in range(4):
        members.handle(TrainingEnded(Slot("a", number)))
    for number in range(3):
        members.handle(Ready(Slot("a", number), 7))
    assert kinds(members.handle(Ready(Slot("a", 3), 7))) == [Assign]
    for number in range(4):
        members.handle(Joined(Slot("a", number), 2))
    members.handle(Ended(A1, KILLED))
    assert Start(A1) in members.handle(Tick(100))
