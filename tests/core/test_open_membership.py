"""Memberships of jobs whose processes another launcher starts."""

from __future__ import annotations

from horovod.core.membership import Membership
from horovod.core.membership_events import Arrived, Assign, Ended, Joined, Policy, Ready, Slot


def test_processes_that_another_launcher_starts_come_by_themselves() -> None:
    """Ranks are as that launcher says, nobody is started, and a loss before the beginning is not waited for."""
    members = Membership(Policy(4, is_elastic=True, is_open=True))
    slots = [Slot("b", 2), Slot("a", 1), Slot("a", 0), Slot("b", 3)]
    for slot in slots:
        assert members.handle(Arrived(slot)) == []
        assert members.is_open(slot)
    assert members.handle(Ended(slots[3], "was killed by SIGKILL")) == []
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
