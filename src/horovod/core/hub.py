"""The coordinator of several hosts: the ranks of a host submit a repeated group of requests with one number.

See ``gathering`` for the part of the hosts. While a rank has joined or left, each submission of a group counts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.coordinator import Coordinator, PendingRequest
from horovod.core.gathering import Members
from horovod.core.generation import Generation
from horovod.core.requests import NO_NOTE

__all__ = ["HubCoordinator"]


class _Group(NamedTuple):
    process_set: int
    match: tuple[int, str | int]
    members: Members
    # Ranks, and the serial number of each one's request.
    serials: Members


class HubCoordinator(Coordinator):
    """See the module, and ``Coordinator``."""

    def __init__(self, generation: Generation, fusion_threshold_bytes: int = 128 << 20, capacity: int = 4096) -> None:
        super().__init__(generation, fusion_threshold_bytes, capacity)
        self._groups: dict[int, dict[int, _Group]] = {ranks[0]: {} for ranks in generation.hosts}

    def declare_group(self, leader: int, number: int, members: Members) -> None:
        """Let ``number`` stand for submissions of one name when the host of ``leader`` submits it."""
        requests = [self._signatures[rank][signature] for rank, signature in members]
        _, process_set, match, _ = requests[0]
        assert match is not None
        serials = tuple([(rank, one.serial) for (rank, _), one in zip(members, requests, strict=True)])
        self._groups[leader][number] = _Group(process_set, match, members, serials)

    def submit_groups(self, leader: int, numbers: Sequence[int]) -> None:
        """Take the groups behind these numbers of the host of ``leader``."""
        groups, size = self._groups[leader], self.size
        for number in numbers:
            process_set, match, members, serials = groups[number]
            if self.joined or self._gone:
                for rank, signature in members:
                    self.submit(rank, signature)
                continue
            pending = self._pending.get(match)
            if pending is None:
                pending = self._pending[match] = PendingRequest(process_set, [None] * size, [NO_NOTE] * size)
            submitted = pending.serials
            for rank, serial in serials:
                submitted[rank] = serial
            pending.count += len(serials)
            if pending.count >= self._needed.get(process_set, 0):
                self._complete(match, pending)

    def leave(self, rank: int, reason: str) -> None:
        """Record that ``rank`` has left; the first of several reasons counts."""
        if rank not in self._gone:
            super().leave(rank, reason)
