"""What an engine needs in order to do without the coordinator now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Lane"]


class Lane(Protocol):
    """By which ranks agree on an entry of the log among themselves, if all of them ask for it at the same time.

    What they agree on counts as the next entry of the log: before any that nobody has executed yet, of which nobody who
    offers is a member. Only who has nothing in flight may call ``meet``; who holds the turn calls all of it.

    Attributes:
        most: the largest number that an entry may have here.
        half: 0 and 1 in turn, see ``Transport.offer``; another one from the moment on at which ``meet`` has succeeded.
    """

    most: int
    half: int

    def meet(self, sequence: int, number: int, note: int, has_news: Callable[[], bool]) -> tuple[int, ...] | None:
        """Offer to execute an entry next, and wait a moment for the others to offer the same.

        Args:
            sequence: how many entries this rank has executed or skipped.
            number: of the entry.
            note: what the transport sends along, for those of the other members.
            has_news: whether there is something else to do; asked now and then.

        Returns:
            Everybody's notes, by rank, if all are going to execute it next; else None.

        Raises:
            PeerLostError: a rank died at the moment at which it was to say whether it does.
            StallError: it did not say so within the timeout.
        """

    def decline(self, sequence: int) -> None:
        """Say that what this rank wants next goes by the coordinator, so that nobody waits for its offer."""
