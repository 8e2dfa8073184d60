"""Lets ``core.membership`` decide for the processes of one job: who is who, and what each of them is answered."""

from __future__ import annotations

from horovod.core.membership import Membership
from horovod.core.membership_events import Decision, Event, Policy, Ready, Refuse
from horovod.rendezvous.protocol import Answer

__all__ = ["Generations"]

_Answers = list[tuple[bytes, Answer]]


class Generations:
    """The generations of one job. No thread of its own, and no clock.

    Args:
        policy: how the members of the job may change.

    Attributes:
        progress: the largest progress of any process when it was last ready.
    """

    def __init__(self, policy: Policy) -> None:
        self._membership = Membership(policy)
        self._decisions: list[Decision] = []
        self.progress = 0

    def handle(self, event: Event) -> _Answers:
        """Take one event.

        Args:
            event: what has happened.

        Returns:
            To whom to say what.
        """
        if isinstance(event, Ready):
            self.progress = max(self.progress, event.progress)
        decisions = self._membership.handle(event)
        self._decisions += [decision for decision in decisions if not isinstance(decision, Refuse)]
        return []

    def take(self) -> list[Decision]:
        """Return the decisions for the launcher since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions
