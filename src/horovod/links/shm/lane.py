"""Ranks of one host agree on what to execute next without the coordinator, if all of them ask for it at the same time.

Each rank has a line of the control page that nobody else writes:

    OFFERS    two words, used in turn: sequence << 24 | number of the entry that it would execute next in the log
    NOTES     two words: what its transport sends along
    TAKEN     how many entries were agreed on here, and are executed or about to be

Who has nothing in flight offers, and looks at the others. Who sees that all of them offer the same takes it: it raises
TAKEN, and executes. Who sees that this will not come about, or has looked for long enough, withdraws its offer, and
then looks once more. A rank that still offers the same may have seen all offers before: it is waited for until it has
taken the entry, so that all must, or has withdrawn, too. Of two ranks, of which one withdraws and looks, and the other
offers and looks, at least one sees what the other did (Dekker's algorithm: both fence in between); so either all take
an entry, or nobody does.

An offer is never mistaken for another one: what is taken raises the sequence. The words of an entry are written again
for the second one after it, which no rank can offer before all have taken the one in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from horovod.transports.base import Watch
from horovod.transports.shm import futex
from horovod.transports.shm.control import HOLDER, LANE_NOTES, LANE_OFFERS, LANE_TAKEN, Control
from horovod.transports.shm.spinner import Spinner

__all__ = ["ShmLane"]

_BITS = 24
#: Instead of the number of an entry: this rank asks the coordinator. Larger than any, as whoever offers will see.
_WITHDRAWN = (1 << _BITS) - 1
#: How often to look at the offers before looking for news once.
_EVERY = 8
_SLICE_S, _CHECK_S = 0.001, 0.1
#: After offers that nobody answered in time, so many are left out, and each time twice as many.
_FEWEST_SKIPPED, _MOST_SKIPPED = 1, 64


class _Half(NamedTuple):
    """Where the words are that are used in turn.

    Attributes:
        offer: of this rank's offer.
        note: of this rank's note.
        offers: reads the offers of all others: one number if there is but one.
        notes: reads the notes of all.
    """

    offer: int
    note: int
    offers: Callable[[memoryview], Any]
    notes: Callable[[memoryview], tuple[int, ...]]


class ShmLane:
    """See ``Lane``.

    Args:
        control: the control page.
        watch: asked about a rank that is waited for.
    """

    most = _WITHDRAWN - 1

    def __init__(self, control: Control, watch: Watch) -> None:
        self._control = control
        self._watch = watch
        self._words = control.words64
        lanes, rank = control.lane, control.rank
        self._others = [other for other in range(control.size) if other != rank]
        self._offers = [[lane + LANE_OFFERS + half for lane in lanes] for half in range(2)]
        self._halves: list[_Half] = []
        for half, offers in enumerate(self._offers):
            notes = [lane + LANE_NOTES + half for lane in lanes]
            others = itemgetter(*[offers[other] for other in self._others])
            self._halves.append(_Half(offers[rank], notes[rank], others, itemgetter(*notes)))
        self._is_pair = control.size == 2
        self._taken = [lane + LANE_TAKEN for lane in lanes]
        self._own_taken = self._taken[rank]
        self._spinner = Spinner(control.crowded, control.siblings)
        self._count = self.half = 0
        self._skipped = self._to_skip = 0

    def decline(self, sequence: int) -> None:
        """Say that what this rank wants next goes by the coordinator."""
        self._words[self._offers[self._count & 1][self._control.rank]] = sequence << _BITS | _WITHDRAWN

    def meet(self, sequence: int, number: int, note: int, has_news: Callable[[], bool]) -> tuple[int, ...] | None:
        """Offer to execute an entry next, and wait a moment for the others to offer the same."""
        if self._to_skip:
            self._to_skip -= 1
            return None
        words, half = self._words, self.half
        own, own_note, read, read_notes = self._halves[half]
        offer = sequence << _BITS | number
        words[own_note] = note
        if not futex.is_strongly_ordered:
            futex.fence()
        words[own] = offer
        futex.fence()
        wanted = offer if self._is_pair else (offer,) * len(self._others)
        if read(words) != wanted and not self._await(offer, wanted, has_news):
            words[own] = sequence << _BITS | _WITHDRAWN
            futex.fence()
            if not self._is_taken(half, offer):
                return None
        words[self._own_taken] = self._count = self._count + 1
        self.half = 1 - half
        self._skipped = 0
        if not futex.is_strongly_ordered:
            futex.fence()
        return read_notes(words)

    def _await(self, offer: int, wanted: int | tuple[int, ...], has_news: Callable[[], bool]) -> bool:
        """Look for the others' offers; return whether all have come."""
        words, read, is_pair = self._words, self._halves[self.half].offers, self._is_pair
        floor = offer >> _BITS << _BITS
        for turn, _ in enumerate(self._spinner.looks(), 1):
            found = read(words)
            if found == wanted:
                self._spinner.succeeded()
                return True
            # Somebody is further, or all have said what they want.
            if found > floor if is_pair else max(found) > offer or min(found) > floor:
                return False
            if not turn % _EVERY and has_news():
                return False
        self._skipped = self._to_skip = min(_MOST_SKIPPED, max(_FEWEST_SKIPPED, 2 * self._skipped))
        return False

    def _is_taken(self, half: int, offer: int) -> bool:
        """Return whether another rank has taken, or is going to take, what this one has withdrawn.

        Raises:
            PeerLostError: a rank died in between.
            StallError: it did not go on within the timeout.
        """
        words, places, taken, count = self._words, self._offers[half], self._taken, self._count
        for rank in self._others:
            started = 0.0
            while True:
                # In this order: who takes it says so before it offers something else.
                found = words[places[rank]]
                if not futex.is_strongly_ordered:
                    futex.fence()
                if words[taken[rank]] > count:
                    return True
                if found != offer:
                    break
                started = self._pause(rank, started)
        return False

    def _pause(self, rank: int, started: float) -> float:
        """Wait for a moment; see ``_is_taken``. Return since when."""
        control = self._control
        clock = time.monotonic()
        started = started or clock
        # Nobody rings for this: it takes a moment, unless the other one does not run.
        control.sleep(control.words32[control.bell[control.rank]], _SLICE_S, HOLDER)
        if clock - started >= _CHECK_S:
            self._watch.check(rank, clock - started)
        return started
