"""The coordinator of several hosts: the ranks of a host submit a repeated group of requests with one number.

See ``gathering`` for the part of the hosts. While hosts submit nothing but groups, the coordinator only counts them.
Before any other submission, and before a rank leaves, counted groups become pending requests of single ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from horovod.core.coordinator import CachedResponse, Coordinator, PendingRequest
from horovod.core.gathering import Declare, DeclareGroup, Leave, Members, Message, Submit, SubmitGroups
from horovod.core.generation import Generation
from horovod.core.requests import NO_NOTE, Request

__all__ = ["HubCoordinator"]


class _Operation:
    """The groups that submit one name."""

    __slots__ = ("__weakref__", "answer", "arrived", "hosts", "match", "process_set")

    def __init__(self, process_set: int, match: Hashable) -> None:
        self.process_set = process_set
        self.match = match
        self.hosts = 0  # how many hosts have members
        self.arrived: list[_Group] = []  # the groups that wait for those of other hosts
        # the response to the present groups of all hosts, and its key; None if one has changed since
        self.answer: tuple[CachedResponse, Hashable] | None = None


class _Group(NamedTuple):
    operation: _Operation
    members: Members
    # The serial numbers of the members' requests, and their place among those of all ranks if the ranks are in a row.
    serials: Sequence[int]
    place: slice | None


class HubCoordinator(Coordinator):
    """See the module, and ``Coordinator``."""

    def __init__(self, generation: Generation, fusion_threshold_bytes: int = 128 << 20, capacity: int = 4096) -> None:
        super().__init__(generation, fusion_threshold_bytes, capacity)
        self._hosts = [set(ranks) for ranks in generation.hosts]
        self._groups: dict[int, dict[int, _Group]] = {ranks[0]: {} for ranks in generation.hosts}
        self._operations: weakref.WeakValueDictionary[Hashable, _Operation] = weakref.WeakValueDictionary()
        # Operations that have groups, in order. Meanwhile no request is pending, and no rank has joined or left.
        self._counted: dict[_Operation, None] = {}

    def take_message(self, message: Message) -> None:
        """Take a message of a host's leader."""
        match message:
            case SubmitGroups():
                self.submit_groups(message.rank, message.numbers)
            case Submit():
                self.submit(message.rank, message.signature, message.note)
            case Declare():
                self.declare(message.rank, message.signature, message.request)
            case DeclareGroup():
                self.declare_group(message.rank, message.number, message.members)
            case Leave():
                self.leave(message.rank, message.reason)

    def declare_group(self, leader: int, number: int, members: Members) -> None:
        """Let ``number`` stand for submissions of one name when the host of ``leader`` submits it."""
        requests = [self._signatures[rank][signature] for rank, signature in members]
        _, process_set, match, _ = requests[0]
        assert match is not None
        operation = self._operations.get(match)
        if operation is None:
            operation = self._operations[match] = _Operation(process_set, match)
            operation.hosts = self._count_hosts(process_set)
        operation.answer = None
        ranks = [rank for rank, _ in members]
        row = range(ranks[0], ranks[0] + len(ranks))
        place = slice(row.start, row.stop) if ranks == list(row) else None
        self._groups[leader][number] = _Group(operation, members, [one.serial for one in requests], place)

    def submit_groups(self, leader: int, numbers: Sequence[int]) -> None:
        """Take the groups behind these numbers of the host of ``leader``."""
        groups = self._groups[leader]
        if self._pending or self.joined or self._gone:
            for number in numbers:
                self._submit_singly(groups[number])
            return
        for number in numbers:
            group = groups[number]
            operation = group.operation
            arrived = operation.arrived
            arrived.append(group)
            if len(arrived) >= operation.hosts:
                self._answer(operation)
            elif len(arrived) == 1:
                self._counted[operation] = None

    def submit(self, rank: int, signature: int, note: int = NO_NOTE) -> None:
        """Take one submission of ``rank``; see ``Coordinator``."""
        if self._counted:
            self._stop_counting()
        super().submit(rank, signature, note)

    def leave(self, rank: int, reason: str) -> None:
        """Record that ``rank`` has left; the first of several reasons counts."""
        if rank not in self._gone:
            self._stop_counting()
            super().leave(rank, reason)

    def fail_pending(self, match: Hashable, error: str, error_type: str) -> None:
        """Answer a pending operation with an error for the ranks that submitted it."""
        self._stop_counting()
        super().fail_pending(match, error, error_type)

    @property
    def is_waiting(self) -> bool:
        """Whether an operation is pending or a rank has joined."""
        return bool(self._counted) or super().is_waiting

    def _all_pending(self) -> dict[Hashable, PendingRequest]:
        if self._pending:
            return self._pending
        found = [(one.match, self._spell_out(one)) for one in list(self._counted)]
        # Another thread that asks for what is waiting may come when groups have just been answered.
        return {match: pending for match, pending in found if pending.count}

    def _stop_counting(self) -> None:
        """Turn counted groups into pending requests."""
        self._pending = self._all_pending()
        for operation in self._counted:
            operation.arrived.clear()
        self._counted.clear()

    def _answer(self, operation: _Operation) -> None:
        """Complete an operation whose groups have all arrived."""
        self._counted.pop(operation, None)
        if operation.answer is not None:
            known, key = operation.answer
            if self._keys.get(known.id) is key:
                operation.arrived.clear()
                self._keys.move_to_end(known.id)
                self._ready.append((known, ()))
                return
        pending = self._pending[operation.match] = self._spell_out(operation)
        operation.arrived.clear()
        learned = self._complete(operation.match, pending)
        operation.answer = None if learned is None else (learned, self._keys[learned.id])

    def _spell_out(self, operation: _Operation) -> PendingRequest:
        pending = PendingRequest(operation.process_set, [None] * self.size, [NO_NOTE] * self.size)
        for group in list(operation.arrived):
            self._add(pending, group)
        return pending

    def _submit_singly(self, group: _Group) -> None:
        """Take a group while not all that is pending consists of groups."""
        if self.joined or self._gone:
            for rank, signature in group.members:
                self.submit(rank, signature)
            return
        process_set, match = group.operation.process_set, group.operation.match
        pending = self._pending.get(match)
        if pending is None:
            pending = self._pending[match] = PendingRequest(process_set, [None] * self.size, [NO_NOTE] * self.size)
        self._add(pending, group)
        if pending.count >= self._needed.get(process_set, 0):
            self._complete(match, pending)

    def _add(self, pending: PendingRequest, group: _Group) -> None:
        if group.place is not None:
            pending.serials[group.place] = group.serials
        else:
            for (rank, _), serial in zip(group.members, group.serials, strict=True):
                pending.serials[rank] = serial
        pending.count += len(group.serials)

    def _change_sets(self, request: Request) -> tuple[int, str]:
        result = super()._change_sets(request)
        for operation in self._operations.values():
            operation.hosts, operation.answer = self._count_hosts(operation.process_set), None
        return result

    def _count_hosts(self, process_set: int) -> int:
        members = self._members(process_set)
        return sum(not ranks.isdisjoint(members) for ranks in self._hosts)
