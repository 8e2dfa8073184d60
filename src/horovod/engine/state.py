"""The state of the engine: operations in flight, place in the log, waiting threads; events in, instructions out.

Pure: no clock, no thread, no I/O; ``execution`` carries the instructions out, and ``loop`` chooses the thread.
Submitting threads only append to ``inbox``, and waiting threads only add to ``waits``. Each of these is one step: after
an interrupt it is either done or not begun. All other state changes only under the turn.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from horovod import errors
from horovod.core.coordinator import LogEntry
from horovod.core.labels import waited_in_vain
from horovod.core.process_sets import ProcessSetTable
from horovod.core.requests import Kind, Response
from horovod.engine.handles import Handle
from horovod.engine.times import new_ring
from horovod.transports.base import Entry

__all__ = ["LEFT", "Complete", "EngineState", "Execute", "ThreadWait"]

#: The error of operations that are in flight when their own rank leaves.
LEFT = "hvd.shutdown() was called"


class ThreadWait(NamedTuple):
    """One thread waits for one operation."""

    thread: int
    handle: Handle
    since_ns: int


class Execute(msgspec.Struct, gc=False):
    """Let the transport execute these entries together."""

    batch: list[tuple[Entry, Handle]]
    notes: tuple[int, ...]


class Complete(msgspec.Struct, gc=False):
    """This operation has ended without the transport: with success, or with an error."""

    handle: Handle
    error: Exception | None = None


class EngineState:
    """See the module. Where ``owns_sets``, log entries change ``sets``; on rank 0 the coordinator does."""

    def __init__(self, rank: int, sets: ProcessSetTable, owns_sets: bool, describe: Callable[[Handle], str]) -> None:
        self._rank = rank
        self._sets = sets
        self._owns_sets = owns_sets
        self._describe = describe
        self._entries: dict[int, Entry] = {}
        self.ring = new_ring()  # the records of the latest operations
        self.inbox: collections.deque[Handle] = collections.deque()  # what the engine has not taken over yet
        # Submissions that are not executed: named ones by process set and name, others by process set.
        self.named: dict[tuple[int, str], Handle] = {}
        self.unnamed: dict[int, collections.deque[Handle]] = {}
        # Operations of which this rank has done its part: fence, members and handles.
        self.unsettled: collections.deque[tuple[int, Sequence[int], list[Handle]]] = collections.deque()
        self.executing: list[Handle] = []  # what the transport executes at this moment
        self.waits: dict[int, ThreadWait] = {}  # the threads that sleep until an operation is done
        self.owners: set[int] = set()  # the thread that has the turn, and those that try to get it
        self.sequence = 0  # log entries that this rank has executed or skipped, the present one included
        self.submitted_ns = 0  # time of the last submission that its thread does not wait for
        self.reason: str | None = None  # the text for the other ranks when this rank leaves; None until then
        self.failure: errors.HorovodInternalError | None = None  # what ended this rank's participation, or None
        self.culprit = -1  # the rank that the log last named as lost, or -1
        self.fused = self.fusions = 0  # operations that were executed together with others, in so many executions

    # -- submissions ---------------------------------------------------------------------------------------------

    def submit(self, handle: Handle) -> None:
        """Hand a submission over; on any thread, which may be interrupted anywhere.

        Raises:
            DuplicateNameError: a tensor of this name is in flight.
        """
        name = handle.cached.name
        try:
            if name is not None and (other := self.named.setdefault(name, handle)) is not handle:
                raise errors.DuplicateNameError(
                    f"a tensor named {name[1].partition('.')[2]!r} is still in flight, submitted at "
                    f"{other.cached.request.site}; synchronize() it first, or give this one another name"
                )
            self.inbox.append(handle)  # from this step on, the submission counts
            self.ring.append(handle.times)
        except BaseException:
            self.withdraw(handle)
            raise

    def withdraw(self, handle: Handle) -> None:
        """Undo ``submit``, as far as it has come, unless the submission was taken over already."""
        try:
            self.inbox.remove(handle)
        except ValueError:
            if handle.accepted:
                return
        name = handle.cached.name
        if name is not None and self.named.get(name) is handle:
            del self.named[name]

    def accept(self) -> Handle | None:
        """Take the oldest submission over; None if there is none."""
        inbox = self.inbox
        while inbox:
            try:
                handle = inbox[0]
                handle.accepted = True
                inbox.remove(handle)
            except (IndexError, ValueError):  # it was withdrawn at this moment
                continue
            if handle.done:
                continue
            cached = handle.cached
            if cached.name is None:
                queue = self.unnamed.get(cached.request.process_set)
                if queue is None:
                    queue = self.unnamed[cached.request.process_set] = collections.deque()
                queue.append(handle)
            return handle
        return None

    def rejected(self, handle: Handle) -> None:
        """Forget the submission taken over last, which could not be sent."""
        if handle.cached.name is not None:
            del self.named[handle.cached.name]
        else:
            self.unnamed[handle.cached.request.process_set].pop()

    # -- the log -------------------------------------------------------------------------------------------------

    def read(self, logged: LogEntry) -> Execute | Complete | None:
        """Take the next entry of the log; None if this rank has nothing to do for it."""
        ids, entries = logged.ids, self._entries
        if logged.response is not None:
            entries[ids[0]] = Entry(logged.response, self._rank)
            return None
        self.sequence += 1
        # Fused entries have the same members, so this rank takes part in all or in none.
        entry = entries[ids[0]]
        if entry.me < 0:
            return None
        handle = self._match(entry)
        if not entry.is_data:
            return self._answer(entry.response, handle)
        batch = [(entry, handle)]
        if len(ids) > 1:
            batch += [(entries[key], self._match(entries[key])) for key in ids[1:]]
            self.fused += len(ids)
            self.fusions += 1
        return Execute(batch, logged.notes)

    def _match(self, entry: Entry) -> Handle:
        """Take out the submission that an entry of the log answers."""
        if entry.name is not None:
            return self.named.pop(entry.name)
        return self.unnamed[entry.response.process_set].popleft()

    def put_back(self, handle: Handle) -> None:
        """Keep an operation whose execution failed, so that it fails with all others."""
        if handle.cached.name is not None:
            self.named[handle.cached.name] = handle
        else:
            self.unnamed.setdefault(handle.cached.request.process_set, collections.deque()).appendleft(handle)

    def _answer(self, response: Response, handle: Handle) -> Complete:
        if response.error:
            error = self._error(response, handle)
            if isinstance(error, errors.PeerLostError):
                self.culprit = error.rank
            return Complete(handle, error)
        request = response.requests[0]
        handle.result = response.result
        if response.kind is Kind.ADD_PROCESS_SET and self._owns_sets:
            self._sets.add(request.ranks, request.root)
        elif response.kind is Kind.REMOVE_PROCESS_SET and self._owns_sets:
            self._sets.remove(request.root)
        return Complete(handle)

    def _error(self, response: Response, handle: Handle) -> Exception:
        """Return the error for the caller of a failed operation."""
        if response.error_type == "ValueError":
            return ValueError(response.error)
        if response.error_type == "PeerLostError" and response.result == self._rank:
            return errors.NotInitializedError(LEFT)
        if response.error_type == "PeerLostError":
            text = waited_in_vain(response.error, self._rank, self._describe(handle))
            return errors.PeerLostError(text, rank=response.result)
        kind: type[errors.HorovodInternalError] = getattr(errors, response.error_type)
        return kind(response.error)

    def settle(self, is_settled: Callable[[Sequence[int], int], bool]) -> list[Handle]:
        """Return the operations of which the other members have done their part, too: have reached their fence."""
        done: list[Handle] = []
        for _ in range(len(self.unsettled)):
            fence, members, handles = self.unsettled.popleft()
            if is_settled(members, fence):
                done += handles
            else:
                self.unsettled.append((fence, members, handles))
        return done

    # -- failing and leaving -------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> errors.HorovodInternalError | None:
        """Note that this rank cannot keep in step with the log any more; return the failure, or None if there
        was one before.
        """
        if self.failure is not None:
            return None
        if not isinstance(error, errors.HorovodInternalError):
            error = errors.HorovodInternalError(f"this rank's engine failed: {error!r}")
        self.failure = error
        return error

    def error(self) -> errors.HorovodInternalError:
        """Return the failure as a new exception."""
        failure = self.failure
        assert failure is not None
        if isinstance(failure, errors.PeerLostError):
            return errors.PeerLostError(str(failure), rank=failure.rank, pid=failure.pid)
        return type(failure)(str(failure))

    def clear(self) -> list[Handle]:
        """Forget and return all operations in flight; one by one, as other threads may submit at this moment."""
        handles = self.in_flight()
        self.unsettled.clear()
        self.named.clear()
        self.unnamed.clear()
        with contextlib.suppress(IndexError):
            while True:
                handle = self.inbox.popleft()
                if handle.cached.name is not None:
                    self.named.pop(handle.cached.name, None)
                handles.append(handle)
        return handles

    # -- questions -----------------------------------------------------------------------------------------------

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done; for any thread, at any moment."""
        found = [handle for _, _, handles in list(self.unsettled) for handle in handles]
        found += list(self.named.values())
        for queue in list(self.unnamed.values()):
            found += list(queue)
        return found + [handle for handle in list(self.inbox) if handle.cached.name is None]

    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not (self.inbox or self.named or self.unsettled or any(self.unnamed.values()))

    def is_awaited(self) -> bool:
        """Whether a thread sleeps until an unfinished operation is done."""
        waits = self.waits
        if waits:
            for key, wait in list(waits.items()):
                if not wait.handle.done:
                    return True
                waits.pop(key, None)
        return False

    def waited_s(self, now_ns: int, otherwise_s: float) -> float:
        """Return the seconds that the first sleeping thread has waited; ``otherwise_s`` if none sleeps."""
        since = [wait.since_ns for wait in list(self.waits.values()) if not wait.handle.done]
        return (now_ns - min(since)) / 1e9 if since else otherwise_s

    def quiet_s(self, now_ns: int) -> float:
        """Return the seconds since the last submission that its thread does not wait for."""
        return (now_ns - self.submitted_ns) / 1e9 if self.submitted_ns else math.inf
