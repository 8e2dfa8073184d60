"""The coordinator of several hosts: of what was the same twice in a row, each host submits all at once, by number.

See ``gathering`` for what hosts do, ``numbers`` for what this one knows of it. A name of which a single submission has
come is decided as on one host; so is everything while somebody has joined or is gone.
"""

from __future__ import annotations

from collections.abc import Hashable

from horovod.core.coordinator import CachedResponse, Coordinator, LogEntry, PendingRequest
from horovod.core.generation import Generation
from horovod.core.numbers import News, Numbers
from horovod.core.requests import NO_NOTE, ORDERED, Request

__all__ = ["HubCoordinator"]


class HubCoordinator(Coordinator):
    """See the module, and ``Coordinator``."""

    def __init__(self, generation: Generation, fusion_threshold_bytes: int = 128 << 20, capacity: int = 4096) -> None:
        super().__init__(generation, fusion_threshold_bytes, capacity)
        self._numbers = Numbers(generation, self.submit, self._capacity)
        self._signature_of: dict[int, int] = {}

    def declare(self, rank: int, signature: int, request: Request) -> None:
        """Let ``signature`` stand for ``request`` when ``rank`` submits it; replaces an earlier meaning."""
        old = self._signatures[rank].get(signature)
        if old is not None:
            self._numbers.redeclare(old.serial)
            del self._signature_of[old.serial]
        super().declare(rank, signature, request)
        self._signature_of[self._serial] = signature

    def submit(self, rank: int, signature: int, note: int = NO_NOTE) -> None:
        """Take one submission of ``rank``; the log grows when it was the last one missing."""
        match = self._signatures[rank][signature].key
        if match is not None and match not in self._pending:
            self._take_numbers()
            self._numbers.open(match)
        super().submit(rank, signature, note)

    def submit_numbers(self, rank: int, bits: int) -> None:
        """Take submissions of ``rank`` by their numbers; those that stand for nothing are ignored."""
        self._numbers.add_rank(rank, bits)

    def submit_together(self, leader: int, bits: int) -> None:
        """Take submissions, by their numbers, of all ranks of the host of ``leader`` that take part in them."""
        self._numbers.add_host(leader, bits)

    def free_number(self, leader: int, number: int) -> None:
        """Note that the host of ``leader`` uses a number no more that was retired."""
        self._numbers.free(leader, number)

    def leave(self, rank: int, reason: str) -> None:
        """Note that ``rank`` takes part no more; ranks that wait for it get ``reason``. The first call counts."""
        if rank in self._gone:
            return
        self._count_singly()
        super().leave(rank, reason)

    def take(self) -> list[LogEntry]:
        """Return the log entries since the last call."""
        self._take_numbers()
        return super().take()

    def take_news(self) -> dict[int, list[News]]:
        """Return what to tell each host of numbers, before the log of the same moment."""
        return self._numbers.take_news()

    @property
    def is_waiting(self) -> bool:
        """Whether something is pending, or somebody has joined."""
        return super().is_waiting or bool(self._numbers)

    def waiting(self) -> list[tuple[Hashable, Request, list[int], list[int]]]:
        """Return what is pending: (key, a request, ranks that submitted, ranks that are missing)."""
        result = super().waiting()
        for match, serial, present in self._numbers.waiting():
            request = self._requests[serial]
            missing = sorted({*self._members(request.process_set)}.difference(present))
            if missing:
                result.append((match, request, present, missing))
        return result

    def fail_pending(self, match: Hashable, error: str, error_type: str) -> None:
        """Answer a pending name with an error for those who submitted it."""
        self._take_numbers()
        self._numbers.open(match)
        super().fail_pending(match, error, error_type)
        self._numbers.close(match)

    def _complete(self, match: Hashable, pending: PendingRequest) -> CachedResponse | None:
        self._take_numbers()
        known = super()._complete(match, pending)
        self._numbers.close(match)
        if known is not None and not self.joined and not self._ready[-1][1]:
            members = [(rank, serial) for rank, serial in enumerate(pending.serials) if serial is not None]
            request = self._requests[members[0][1]]
            if request.name and request.kind not in ORDERED:
                self._numbers.note_run(known, [(rank, self._signature_of[serial], serial) for rank, serial in members])
        return known

    def _forget(self, oldest: CachedResponse) -> None:
        super()._forget(oldest)
        self._numbers.forget(oldest)

    def _forget_set(self, key: int) -> None:
        self._numbers.forget_set(key)
        super()._forget_set(key)

    def _join(self, rank: int, request: Request) -> None:
        self._count_singly()
        super()._join(rank, request)

    def _end_joins(self) -> None:
        super()._end_joins()
        if not self._gone:
            self._numbers.resume()

    def _take_numbers(self) -> None:
        """Take what is complete of what was submitted by number."""
        for known in self._numbers.take_complete():
            self._keys.move_to_end(known.id)
            self._ready.append((known, ()))

    def _count_singly(self) -> None:
        """Count by rank, from now on, what is submitted by number: somebody takes part no more."""
        self._take_numbers()
        self._numbers.pause()
