"""Gathers the submissions of one host's ranks, for the coordinator on another host: one for all ranks of the host.

A rank's submission of a name is kept here until all member ranks of the host have submitted it. No operation can be
complete earlier, so this delays nothing. These submissions form a *group*. A group that comes twice in a row gets a
number, which stands for it from then on.

A submission without a name is passed on at once. The coordinator must know the submissions of single ranks if the
other ranks will not follow, or not soon, because a rank joins, leaves or is late. Then submissions are passed on rank
by rank, until the log shows that this round is over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from horovod.core.coordinator import LogEntry
from horovod.core.requests import NO_NOTE, ORDERED, Kind, Request, Response

__all__ = ["Declare", "DeclareGroup", "Gathering", "Leave", "Members", "Message", "Rank", "Submit", "SubmitGroups"]

#: Ranks and the signature that each submits.
Members: TypeAlias = tuple[tuple[int, int], ...]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
Number = Annotated[int, msgspec.Meta(ge=0)]
#: Maximum count of names with a number.
_MOST = 4096


class Declare(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """From now on ``signature`` stands for ``request``, when ``rank`` submits it."""

    rank: Rank
    signature: int
    request: Request


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """``rank`` submits the request behind ``signature``."""

    rank: Rank
    signature: int
    note: int


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """``rank`` has left."""

    rank: Rank
    reason: str


class DeclareGroup(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """From now on ``number`` stands for submissions of ``members``, pairs of a rank and a signature.

    ``rank`` is the leader of their host.
    """

    rank: Rank
    number: Number
    members: Annotated[tuple[tuple[Rank, int], ...], msgspec.Meta(min_length=1)]


class SubmitGroups(msgspec.Struct, frozen=True, array_like=True, tag=18, gc=False):
    """The host whose leader is ``rank`` submits the groups behind these numbers."""

    rank: Rank
    numbers: list[Number]


#: A message from the leader of a host to the coordinator; its tags are those of ``links.hosts.frames``.
Message: TypeAlias = Declare | Submit | Leave | DeclareGroup | SubmitGroups


class _Subject(NamedTuple):
    process_set: int
    # Process set and name; None for a request that must be passed on in order.
    match: Hashable | None
    kind: Kind


@dataclass
class _Group:
    number: int
    members: Members = ()
    is_declared: bool = False


class Gathering:
    """See the module. The first of the ranks is its host's leader; ``send`` takes a message for the coordinator."""

    def __init__(self, ranks: Sequence[int], send: Callable[[Message], object]) -> None:
        self._ranks = tuple(ranks)
        self._send = send
        self._subjects: dict[int, dict[int, _Subject]] = {rank: {} for rank in ranks}
        # How many ranks of this host take part, by process set.
        self._counts = {0: len(self._ranks)}
        # By name: submissions that are kept; how many were passed on rank by rank in this round; the last group.
        self._held: dict[Hashable, list[tuple[int, int, int]]] = {}
        self._loose: dict[Hashable, int] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._ready: list[int] = []
        self._old: list[Hashable] = []
        self._joined = self._left = False
        self._match_of: dict[int, Hashable] = {}

    @property
    def is_holding(self) -> bool:
        """Whether a submission is kept here."""
        return bool(self._held)

    # -- calls of the ranks --------------------------------------------------------------------------------------

    def declare(self, rank: int, signature: int, request: Request) -> None:
        """Let ``signature`` stand for ``request`` when ``rank`` submits it."""
        old = self._subjects[rank].get(signature)
        if old is not None and old.match in self._groups:
            self._groups[old.match].members = ()
        match = (request.process_set, request.name) if request.name and request.kind not in ORDERED else None
        self._subjects[rank][signature] = _Subject(request.process_set, match, request.kind)
        self._send(Declare(rank, signature, request))

    def submit(self, rank: int, signature: int, note: int) -> None:
        """Take one submission of ``rank``."""
        process_set, match, kind = self._subjects[rank][signature]
        if match is None or self._joined or self._left:
            if kind in ORDERED:
                self._pass_on(list(self._held))
                self.collect()
                self._joined |= kind is Kind.JOIN
            self._send(Submit(rank, signature, note))
            return
        count = self._counts.get(process_set, 0)
        if match in self._loose:
            self._send(Submit(rank, signature, note))
            self._loose[match] += 1
            if self._loose[match] >= count:
                del self._loose[match]
            return
        held = self._held.setdefault(match, [])
        held.append((rank, signature, note))
        if len(held) >= count:
            del self._held[match]
            self._complete(match, held)

    def leave(self, rank: int, reason: str) -> None:
        """Note that ``rank`` has left."""
        self._left = True
        self._pass_on(list(self._held))
        self.collect()
        self._send(Leave(rank, reason))

    def collect(self) -> None:
        """Pass on the numbers of complete groups."""
        if self._ready:
            self._send(SubmitGroups(self._ranks[0], self._ready))
            self._ready = []

    def collect_old(self) -> None:
        """Do ``collect``, and also pass on submissions that were already held at the last call."""
        self.collect()
        self._pass_on([match for match in self._old if match in self._held])
        self._old = list(self._held)

    def _pass_on(self, matches: Iterable[Hashable]) -> None:
        """Pass names on rank by rank, until their round is over."""
        for match in matches:
            held = self._held.pop(match)
            self._loose[match] = len(held)
            for one in held:
                self._send(Submit(*one))

    def _complete(self, match: Hashable, held: list[tuple[int, int, int]]) -> None:
        """Pass on a name that all member ranks of the host have submitted."""
        held.sort()
        members = tuple([(rank, signature) for rank, signature, _ in held])
        group = self._groups.get(match)
        if group is None:
            if len(self._groups) == _MOST:
                self.collect()
                self._groups.clear()
            group = self._groups[match] = _Group(len(self._groups))
        if group.members != members or any(note != NO_NOTE for _, _, note in held):
            group.members, group.is_declared = members, False
            for one in held:
                self._send(Submit(*one))
            return
        if not group.is_declared:
            group.is_declared = True
            self._send(DeclareGroup(self._ranks[0], group.number, members))
        self._ready.append(group.number)

    # -- calls of the coordinator --------------------------------------------------------------------------------

    def observe(self, log: Iterable[LogEntry]) -> None:
        """Note the finished rounds in the log, before any rank of the host sees the log."""
        for entry in log:
            if entry.response is not None:
                self._note(entry.ids[0], entry.response)
            elif self._loose:
                for key in entry.ids:
                    self._loose.pop(self._match_of[key], None)

    def _note(self, key: int, response: Response) -> None:
        self._match_of[key] = (response.process_set, response.name)
        if response.kind is Kind.JOIN:
            self._joined = False
            self._loose.clear()
        elif response.kind is Kind.ADD_PROCESS_SET and not response.error:
            self._counts[response.result] = len({*self._ranks}.intersection(response.requests[0].ranks))
        elif response.kind is Kind.REMOVE_PROCESS_SET and not response.error:
            self._counts.pop(response.result, None)
