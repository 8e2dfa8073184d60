"""Tables of events for ``core.membership``: slots, a job that has begun, and what it decides."""

from __future__ import annotations

from horovod.core.membership import Membership
from horovod.core.membership_events import (
    Assign,
    Decision,
    Discovered,
    Ended,
    Joined,
    Leaving,
    Left,
    Policy,
    Ready,
    Slot,
    Start,
    Tick,
)

__all__ = ["A0", "A1", "A2", "B0", "B1", "ELASTIC", "KILLED", "do", "kinds", "ranks", "started"]

A0, A1, A2, B0, B1 = (Slot(host, i) for host, i in (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)))
KILLED = "was killed by SIGKILL"
ELASTIC = Policy(4, minimum=2, maximum=5, is_discovering=True, cool_down_s=(10, 40))


def started(policy: Policy, **hosts: int) -> Membership:
    """A job whose first generation has begun."""
    members = Membership(policy)
    started = [d.slot for d in members.handle(Discovered(hosts)) if isinstance(d, Start)]
    for slot in started:
        do(members, Ready(slot))
    return members


def do(members: Membership, event: Ready | Ended | Left | Leaving | Discovered | Tick) -> list[Decision]:
    """Hand over an event; all that are assigned join."""
    decisions = members.handle(event)
    for decision in decisions:
        if isinstance(decision, Assign):
            for slot in decision.positions:
                decisions = [*decisions, *members.handle(Joined(slot, decision.generation))]
    return decisions


def ranks(decisions: list[Decision]) -> list[Slot]:
    return next(list(d.positions) for d in decisions if isinstance(d, Assign))


def kinds(decisions: list[Decision]) -> list[type]:
    return [type(d) for d in decisions]
