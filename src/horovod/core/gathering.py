"""The submissions of the ranks of one host, on their way to a coordinator on another: what all have submitted is a bit.

An operation that one name stood for twice in a row gets a *number* from the coordinator, for all hosts. A rank's
submission of it is kept here until all ranks of the host have submitted it that take part. Then the host submits it,
all such numbers together, as one integer of bits. Nothing can be complete before, so nothing is delayed.

A submission without a number is passed on at once. It may be that the coordinator has to know what a single rank has
submitted, as the others will not follow, or not soon: another signature under the same name, a rank that joins or
leaves, or one that is late. Then the numbers in question are passed on rank by rank, until the log says that this round
is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple, Protocol

from horovod.core.coordinator import LogEntry
from horovod.core.requests import NO_NOTE, ORDERED, Kind, Request
from horovod.core.tally import Tally

__all__ = ["Gathering", "Receiver"]


class Receiver(Protocol):
    """Takes what a host submits: the coordinator, or what brings it there."""

    def declare(self, rank: int, signature: int, request: Request) -> None:
        """Let ``signature`` stand for ``request`` when ``rank`` submits it."""

    def submit(self, rank: int, signature: int, note: int) -> None:
        """Take one submission of ``rank``."""

    def submit_numbers(self, rank: int, bits: int) -> None:
        """Take submissions of ``rank`` by their numbers."""

    def submit_together(self, leader: int, bits: int) -> None:
        """Take submissions, by their numbers, of all ranks of the host of ``leader`` that take part in them."""

    def leave(self, rank: int, reason: str) -> None:
        """Note that ``rank`` takes part no more."""


class _Subject(NamedTuple):
    # Process set and name; None if it has no name.
    match: Hashable | None
    kind: Kind


class Gathering:
    """See the module.

    Args:
        ranks: of the host; the first one leads it.
        receiver: what takes the submissions.
    """

    def __init__(self, ranks: Sequence[int], receiver: Receiver) -> None:
        self._ranks = tuple(ranks)
        self._receiver = receiver
        self._subjects: dict[int, dict[int, _Subject]] = {rank: {} for rank in ranks}
        self._bit_of: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
        self._members: dict[int, tuple[tuple[int, int], ...]] = {}
        self._bit_of_match: dict[Hashable, int] = {}
        self._match_of: dict[int, Hashable] = {}
        self._join_id = -1
        self._tally = Tally(ranks)
        # Numbers that are passed on rank by rank in this round; all are while a rank of the host has joined or left.
        self._loose = 0
        self._joined = self._left = False
        self._old: dict[int, int] = {}

    @property
    def is_holding(self) -> bool:
        """Whether a submission is kept here."""
        return bool(self._tally)

    # -- what the ranks say --------------------------------------------------------------------------------------

    def declare(self, rank: int, signature: int, request: Request) -> None:
        """Let ``signature`` stand for ``request`` when ``rank`` submits it."""
        held = self._bit_of[rank].get(signature, 0) & self._tally.bits[rank]
        if held:
            self._loosen(held)
        name = request.name
        self._subjects[rank][signature] = _Subject((request.process_set, name) if name else None, request.kind)
        self._receiver.declare(rank, signature, request)

    def submit(self, rank: int, signature: int, note: int) -> None:
        """Take one submission of ``rank``."""
        bit = self._bit_of[rank].get(signature)
        if bit is not None and note == NO_NOTE:
            self._tally.bits[rank] |= bit
            return
        subject = self._subjects[rank][signature]
        if subject.kind in ORDERED:
            # It depends on the order of the requests before it.
            self.collect()
            self._loosen(reduce(or_, self._tally.bits.values()))
            self._joined |= subject.kind is Kind.JOIN
        elif subject.match in self._bit_of_match:
            self._loosen(self._bit_of_match[subject.match])
        self._receiver.submit(rank, signature, note)

    def submit_all(self, rank: int, signatures: Sequence[int], notes: Sequence[int]) -> None:
        """Take several submissions of ``rank``."""
        if notes.count(NO_NOTE) == len(notes):
            bits = self._tally.bits
            try:
                bits[rank] = reduce(or_, map(self._bit_of[rank].__getitem__, signatures), bits[rank])
                return
            except KeyError:
                pass  # one of them has no number
        for signature, note in zip(signatures, notes, strict=True):
            self.submit(rank, signature, note)

    def leave(self, rank: int, reason: str) -> None:
        """Note that ``rank`` takes part no more."""
        self._left = True
        self.collect()
        self._receiver.leave(rank, reason)

    def collect(self) -> None:
        """Pass on what is complete, and what others should know of."""
        if self._joined or self._left:
            self._pass_on(-1)
        elif self._loose:
            self._pass_on(self._loose)
        complete = self._tally.take_complete()
        if complete:
            self._receiver.submit_together(self._ranks[0], complete)

    def collect_old(self) -> None:
        """Pass on, too, what has been kept since the last call."""
        self.collect()
        bits = self._tally.bits
        if self._old:
            self._loosen(reduce(or_, [bits[rank] & old for rank, old in self._old.items()]))
        self._old = dict(bits) if self._tally else {}

    def _loosen(self, bits: int) -> None:
        """Pass numbers on rank by rank, until they have run."""
        self._loose |= bits
        self._pass_on(bits)

    def _pass_on(self, bits: int) -> None:
        for rank, all_held in self._tally.bits.items():
            held = all_held & bits
            if held:
                self._tally.bits[rank] = all_held & ~held
                self._receiver.submit_numbers(rank, held)

    # -- what the coordinator says -------------------------------------------------------------------------------

    def number(self, number: int, members: Iterable[tuple[int, int]]) -> None:
        """Let ``number`` stand for submissions of ranks of this host.

        Args:
            number: is not in use.
            members: ranks that take part, and the signature that each submits.
        """
        bit, known = 1 << number, tuple(members)
        self._members[number] = known
        for rank, signature in known:
            self._bit_of[rank][signature] = bit
            match = self._subjects[rank][signature].match
            if match is not None:
                self._bit_of_match[match] = bit
        self._tally.enrol(bit, [rank for rank, _ in known])

    def retire(self, number: int) -> None:
        """Let ``number`` stand for nothing, from the next submission on."""
        bit, members = 1 << number, self._members.pop(number)
        self._pass_on(bit)
        self._loose &= ~bit
        for rank, signature in members:
            if self._bit_of[rank].get(signature) == bit:
                del self._bit_of[rank][signature]
        for match in [match for match, other in self._bit_of_match.items() if other == bit]:
            del self._bit_of_match[match]
        self._tally.strike(bit, [rank for rank, _ in members])

    def observe(self, log: Iterable[LogEntry]) -> None:
        """See from the log which rounds are over, before any rank of the host sees it."""
        for entry in log:
            if (response := entry.response) is not None:
                self._match_of[entry.ids[0]] = (response.process_set, response.name)
                if response.kind is Kind.JOIN:
                    self._join_id = entry.ids[0]
            else:
                if self._loose:
                    for key in entry.ids:
                        self._loose &= ~self._bit_of_match.get(self._match_of[key], 0)
                if self._join_id in entry.ids:
                    self._joined, self._join_id = False, -1
