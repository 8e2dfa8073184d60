"""The coordinator: requests of all ranks in, one totally ordered log out. Pure: no I/O, no clock, no thread.

A request is *declared* once per distinct signature and *submitted* as often as it is used; a submission is
one small integer. When the last member has submitted a name, the coordinator appends the response to the
log. The response, too, is declared once, the first time this combination of signatures meets, and is an
integer from then on. This replaces Horovod's response cache without a separate mechanism.

Unnamed requests of a process set match in the order in which each rank submits them, of any kind.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import msgspec

from horovod.core import mismatch
from horovod.core.generation import Generation
from horovod.core.requests import NO_NOTE, Kind, Request, Response

__all__ = ["MAX_FUSED", "CachedResponse", "Coordinator", "LogEntry", "PendingRequest", "fuse"]


class LogEntry(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """One entry of the log, and the message with it between hosts: the members of these responses execute them next."""

    ids: tuple[int, ...]  # the numbers of the responses
    notes: tuple[int, ...] = ()  # one number from each member's transport; empty unless all members have sent one
    # when set, the entry executes nothing: from now on its single id stands for this response
    response: Response | None = None


class PendingRequest(msgspec.Struct, eq=False):
    """A request that some, but not all, members have submitted."""

    process_set: int
    serials: list[int | None]
    notes: list[int]
    count: int = 0


class _CachedRequest(NamedTuple):
    serial: int
    process_set: int
    # None for an unnamed request, which is matched by its order of submission.
    key: tuple[int, str | int] | None
    # The request if it is a join, else None.
    join: Request | None


class CachedResponse(NamedTuple):
    """A response that the coordinator remembers."""

    id: int  # stands for it in the log
    fuse_key: Hashable | None  # what may be executed together has the same one; None for what must not
    nbytes: int  # of one rank's tensors


class _FuseKey:
    """A key that is compared by identity, because the tuple behind it may hold one string per rank."""

    __slots__ = ("__weakref__",)


class Coordinator:
    """See the module. A fusion threshold of 0 switches fusion off; ``capacity`` limits the cached responses."""

    def __init__(self, generation: Generation, fusion_threshold_bytes: int = 128 << 20, capacity: int = 4096) -> None:
        self.size = size = generation.size
        self.sets = generation.sets
        self.joined: list[int] = []
        self._threshold = fusion_threshold_bytes
        self._capacity = max(1, capacity)
        # By rank: the request behind each signature, and the number of unnamed requests sent to each process set.
        self._signatures: list[dict[int, _CachedRequest]] = [{} for _ in range(size)]
        self._unnamed: list[dict[int, int]] = [{} for _ in range(size)]
        self._needed: dict[int, int] = {0: size}
        self.join_request = Request("join", Kind.JOIN)
        # By rank, why it left, in order of departure: the first departure caused the others.
        self._gone: dict[int, str] = {}
        self._serial = 0
        self._requests: dict[int, Request] = {}
        self._pending: dict[Hashable, PendingRequest] = {}
        self._known: dict[Hashable, CachedResponse] = {}
        # The key of each id, least recently used first. A key may contain one number per rank.
        self._keys: collections.OrderedDict[int, Hashable] = collections.OrderedDict()
        self._fuse_keys: weakref.WeakValueDictionary[Hashable, _FuseKey] = weakref.WeakValueDictionary()
        self._free_ids: collections.deque[int] = collections.deque()
        self._fresh_ids = itertools.count()
        self._log: list[LogEntry] = []
        self._ready: list[tuple[CachedResponse, tuple[int, ...]]] = []

    def declare(self, rank: int, signature: int, request: Request) -> None:
        """Let ``signature`` stand for ``request`` when ``rank`` submits it; replaces an earlier meaning."""
        table = self._signatures[rank]
        old = table.get(signature)
        if old is not None:
            del self._requests[old.serial]
        self._serial += 1
        self._requests[self._serial] = request
        process_set, name = request.process_set, request.name
        join = request if request.kind is Kind.JOIN else None
        table[signature] = _CachedRequest(self._serial, process_set, (process_set, name) if name else None, join)

    def submit(self, rank: int, signature: int, note: int = NO_NOTE) -> None:
        """Take one submission of ``rank``; the log grows when it was the last one missing. ``note`` is a number from
        its transport for the transports of the other members.
        """
        serial, process_set, match, join = self._signatures[rank][signature]
        if join is not None:
            self._join(rank, join)
            return
        if match is None:
            counts = self._unnamed[rank]
            counts[process_set] = order = counts.get(process_set, 0) + 1
            match = (process_set, order)
        pending = self._pending.get(match)
        if pending is None:
            pending = self._pending[match] = PendingRequest(process_set, [None] * self.size, [NO_NOTE] * self.size)
        pending.serials[rank] = serial
        pending.notes[rank] = note
        pending.count = count = pending.count + 1
        if count >= self._needed.get(process_set, 0) and not (self.joined and self._missing(pending)):
            self._complete(match, pending)
        elif self._gone:
            self._fail_if_hopeless(match, pending)

    def leave(self, rank: int, reason: str) -> None:
        """Record that ``rank`` has left; operations that wait for it fail with ``reason``."""
        self._gone[rank] = reason
        for match, pending in list(self._pending.items()):
            self._fail_if_hopeless(match, pending)
        if self.joined:
            self._fail_joins(rank)

    def take(self) -> list[LogEntry]:
        """Return the log entries since the last call."""
        ready = self._ready
        if len(ready) == 1 and not self._log:
            # Fast path for the usual case.
            known, notes = ready.pop()
            return [LogEntry((known.id,), notes)]
        if ready:
            self._flush_ready()
        log, self._log = self._log, []
        return log

    @property
    def is_waiting(self) -> bool:
        """Whether an operation is pending or a rank has joined."""
        return bool(self._pending or self.joined)

    def waiting(self) -> list[tuple[Hashable, Request, list[int], list[int]]]:
        """Return the pending operations: (key, a request, ranks that submitted, ranks that are missing)."""
        result = []
        for match, pending in self._all_pending().items():
            present = [rank for rank, serial in enumerate(pending.serials) if serial is not None]
            result.append((match, self._request_of(pending), present, self._missing(pending)))
        return result

    def fail_pending(self, match: Hashable, error: str, error_type: str) -> None:
        """Answer a pending operation with an error for the ranks that submitted it."""
        pending = self._pending.pop(match, None)
        if pending is not None:
            self._error(pending, error, error_type)

    def _all_pending(self) -> dict[Hashable, PendingRequest]:
        return self._pending

    def _request_of(self, pending: PendingRequest) -> Request:
        return self._requests[next(serial for serial in pending.serials if serial is not None)]

    def _members(self, process_set: int) -> tuple[int, ...]:
        return self.sets.members(process_set) if process_set in self.sets else ()

    def _missing(self, pending: PendingRequest) -> list[int]:
        # Submissions that a rank made before it joined count.
        members = self._members(pending.process_set)
        return [rank for rank in members if pending.serials[rank] is None and rank not in self.joined]

    def _complete(self, match: Hashable, pending: PendingRequest) -> CachedResponse | None:
        """Answer what all have submitted; return the response if it is remembered."""
        del self._pending[match]
        serials = tuple(pending.serials)
        key = (serials, len(self.joined))
        known = self._known.get(key)
        if known is None:
            known = self._learn(key, pending)
            if known is None:
                return None
        else:
            self._keys.move_to_end(known.id)
        notes = pending.notes
        if pending.process_set or self.joined:
            notes = [notes[rank] for rank, serial in enumerate(serials) if serial is not None]
        self._ready.append((known, () if NO_NOTE in notes else tuple(notes)))
        return known

    def _learn(self, key: Hashable, pending: PendingRequest) -> CachedResponse | None:
        """Compare the requests of all ranks; return the response, or None if it was used once and is in the log."""
        members = tuple(rank for rank, serial in enumerate(pending.serials) if serial is not None)
        requests = [self._requests[serial] for serial in pending.serials if serial is not None]
        all_members = self._members(pending.process_set)
        joined = [rank for rank in all_members if rank in self.joined and rank not in members]
        error, error_type = mismatch.compare(members, requests, joined), "MismatchError"
        first = requests[0]
        result = 0
        if not error and first.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET):
            result, error = self._change_sets(first)
            error_type = "ValueError"
        if error:
            self._error(pending, error, error_type)
            return None
        bare = tuple(Request(*(getattr(r, name) for name in Request.__struct_fields__[:-1])) for r in requests)
        if all(request == bare[0] for request in bare):
            bare = bare[:1]
        divisor = len(all_members)
        response = Response(first.kind, first.name, first.process_set, members, divisor, bare, result=result)
        if first.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET):
            self._run_once(response)
            return None
        nbytes = sum(tensor.nbytes for tensor in first.tensors)
        known = CachedResponse(self._declare(response), self._fuse_key(response), nbytes)
        self._known[key] = known
        self._keys[known.id] = key
        if len(self._known) > self._capacity:
            oldest, forgotten = self._keys.popitem(last=False)
            del self._known[forgotten]
            # The id may be reused at once: the log is ordered, so nobody confuses the two meanings. The oldest
            # one is ready, and not in the log yet, only if all that are remembered are.
            if len(self._ready) >= len(self._known):
                self._flush_ready()
            self._free_ids.append(oldest)
        return known

    def _fuse_key(self, response: Response) -> _FuseKey | None:
        classes = tuple(request.fuse_class for request in response.requests)
        if not all(classes):
            return None
        return self._fuse_keys.setdefault((response.kind, response.members, response.divisor, classes), _FuseKey())

    def _change_sets(self, request: Request) -> tuple[int, str]:
        if request.kind is Kind.ADD_PROCESS_SET:
            error = self.sets.check(request.ranks, request.root)
            if error:
                return 0, error
            result = self.sets.add(request.ranks, request.root)
            self._needed[result] = len(request.ranks)
            return result, ""
        if request.root not in self.sets or request.root == 0:
            return 0, f"process set {request.root} cannot be removed: it does not exist or holds all ranks"
        self._forget_set(request.root)
        return request.root, ""

    def _forget_set(self, key: int) -> None:
        for match, pending in list(self._pending.items()):
            if pending.process_set == key:
                request = self._request_of(pending)
                error = (
                    f"{mismatch.describe_waiting(request)} still waited for ranks {self._missing(pending)} when "
                    f"process set {key} was removed; synchronize() on all of its members before remove_process_set()"
                )
                self.fail_pending(match, error, "MismatchError")
        # The id will be given to another set, which counts its unnamed requests from the beginning.
        for counts in self._unnamed:
            counts.pop(key, None)
        self.sets.remove(key)
        del self._needed[key]

    def _join(self, rank: int, request: Request) -> None:
        self.joined.append(rank)
        self.join_request = request
        for key in self._needed:
            if rank in self.sets.members(key):
                self._needed[key] -= 1
        for match, pending in list(self._pending.items()):
            if not self._missing(pending):
                self._complete(match, pending)
        if self._gone:
            self._fail_joins(next(iter(self._gone)))
        elif len(self.joined) == self.size:
            self._end_joins()
            # Nothing is pending, so all ranks can count their unnamed requests from the beginning.
            for counts in self._unnamed:
                counts.clear()
            members = tuple(range(self.size))
            self._run_once(Response(Kind.JOIN, request.name, 0, members, self.size, (request,), result=rank))

    def _end_joins(self) -> None:
        self.joined = []
        self._needed = {key: len(self.sets.members(key)) for key in self._needed}

    def _fail_joins(self, culprit: int) -> None:
        members, reason = tuple(sorted(self.joined)), self._gone[culprit]
        self._end_joins()
        name = self.join_request.name
        error_type = "PeerLostError"
        self._run_once(Response(Kind.JOIN, name, 0, members, error=reason, error_type=error_type, result=culprit))

    def _fail_if_hopeless(self, match: Hashable, pending: PendingRequest) -> None:
        members = self._members(pending.process_set)
        for rank, reason in self._gone.items():
            if rank in members and pending.serials[rank] is None:
                del self._pending[match]
                self._error(pending, reason, "PeerLostError", rank)
                return

    def _error(self, pending: PendingRequest, error: str, error_type: str, culprit: int = -1) -> None:
        members = tuple(rank for rank, serial in enumerate(pending.serials) if serial is not None)
        request = self._request_of(pending)
        what = request.kind, request.name, pending.process_set, members
        self._run_once(Response(*what, error=error, error_type=error_type, result=culprit))

    def _run_once(self, response: Response) -> None:
        self._flush_ready()
        key = self._declare(response)
        self._log.append(LogEntry((key,)))
        self._free_ids.append(key)

    def _declare(self, response: Response) -> int:
        key = self._free_ids.popleft() if self._free_ids else next(self._fresh_ids)
        self._log.append(LogEntry((key,), response=response))
        return key

    def _flush_ready(self) -> None:
        ready, self._ready = self._ready, []
        if len(ready) == 1:
            known, notes = ready[0]
            self._log.append(LogEntry((known.id,), notes))
            return
        # Notes belong to one entry, so a response with notes is executed alone.
        entries = [(i, None if notes else known.fuse_key, known.nbytes) for i, (known, notes) in enumerate(ready)]
        for group in fuse(entries, self._threshold):
            notes = ready[group[0]][1]
            self._log.append(LogEntry(tuple(ready[i][0].id for i in group), notes))


#: Log entries that are executed as one, at most.
MAX_FUSED = 256


def fuse(entries: Iterable[tuple[int, Hashable | None, int]], threshold_bytes: int) -> list[list[int]]:
    """Group neighbouring log entries (id, key, bytes) that are executed as one; return their ids.

    Only neighbours fuse, so the order of the log stays the order of readiness. Their keys are equal and not None, and
    they have at most ``threshold_bytes`` together; 0 switches fusion off.
    """
    groups: list[list[int]] = []
    last_key: Hashable | None = None
    total = 0
    for entry, key, nbytes in entries:
        fits = key is not None and key == last_key and total + nbytes <= threshold_bytes
        if fits and len(groups[-1]) < MAX_FUSED:
            groups[-1].append(entry)
            total += nbytes
        else:
            groups.append([entry])
            last_key, total = key, nbytes
    return groups
