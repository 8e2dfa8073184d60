"""Carries out the decisions of ``state``: sends submissions, lets the transport execute the log, fails, and leaves.

All of it runs on the thread that has the turn, unless a method says otherwise.
"""

from __future__ import annotations

import threading

from horovod import errors
from horovod.core.mismatch import describe_waiting
from horovod.core.requests import NO_NOTE
from horovod.engine.handles import Handle
from horovod.engine.link import Link
from horovod.engine.liveness import encode_reason
from horovod.engine.ports import Observer
from horovod.engine.request_cache import RequestCache
from horovod.engine.state import LEFT, Complete, EngineState, Execute
from horovod.engine.times import ENDED, SEQUENCE, STARTED, TOGETHER, now

__all__ = ["Execution"]

#: Number of small operations that are executed before the thread that waits for the first of them is woken.
_MOST_DELAYED = 64


class Execution:
    """See the module."""

    def __init__(self, link: Link, requests: RequestCache, observer: Observer) -> None:
        self._link = link
        self._channel, self._transport = link.channel, link.transport
        self._requests = requests
        self._observer = observer
        self._watch = link.watch
        if link.watch is not None:
            link.watch.executing = self._executing
        # Engine and coordinator share one table of process sets: at home the coordinator changes it, elsewhere the log.
        self.state = EngineState(link.rank, link.generation.sets, link.coordinator is None, self.describe)
        # A waiting thread uses these again and again, so avoid the longer attribute paths.
        self._inbox, self._unsettled, self._log_has_news = self.state.inbox, self.state.unsettled, link.channel.has_news
        self._to_wake: list[Handle] = []
        self._delayed = 0
        self._parting = threading.RLock()  # a signal handler may announce, too
        self._is_announced = self._has_parted = False

    @property
    def culprit(self) -> int:
        """The rank that caused a failure here, or -1."""
        failure = self.state.failure
        return failure.rank if isinstance(failure, errors.PeerLostError) else self.state.culprit

    def describe(self, handle: Handle) -> str:
        """Return a submission in words."""
        request = handle.cached.request
        return describe_waiting(request, self._requests.count(request)[0])

    def _executing(self) -> str:
        handles = self.state.executing or [handle for _, _, handles in self._unsettled for handle in handles]
        return self.describe(handles[0]) if handles else ""

    # -- the log -------------------------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether there is something to do."""
        if self._inbox or self._log_has_news():
            return True
        if not self._unsettled:
            return False
        settled = self._transport.settled
        # A copy: the thread that has the turn may remove some at this moment.
        for fence, members, _ in list(self._unsettled):  # noqa: SIM110  spun on, as in the channels
            if settled(members, fence):
                return True
        return False

    def step(self, awaited: bool) -> None:
        """Take over submissions and execute the new log entries; after a failure, fail all operations in flight.

        Raises:
            HorovodInternalError: an entry could not be executed; this rank is out of step for good.
        """
        state = self.state
        if state.failure is not None:
            self.sweep()
            return
        self._channel.patient = self._transport.is_awaited = awaited
        if state.inbox:
            self._accept(awaited)
        self.advance()

    def _accept(self, patient: bool) -> None:
        """Send new submissions to the coordinator. ``patient``: other ranks need not be woken at once."""
        state = self.state
        while state.inbox:
            handle = state.accept()
            if handle is None:
                return
            cached = handle.cached
            if cached.id < 0:
                self._requests.declare(handle)
            cached.in_flight += 1
            cached.uses += 1
            note = NO_NOTE
            if cached.inline is not None:
                try:
                    note = self._transport.offer(handle, cached.inline)
                except Exception as error:  # no memory for the copy; no other rank knows of the submission yet
                    state.rejected(handle)
                    self._fail(handle, error)
                    continue
            self._channel.submit(cached.id, note, patient)

    def advance(self) -> None:
        """Execute the new log entries.

        Raises:
            HorovodInternalError: an entry could not be executed; this rank is out of step for good.
        """
        state, take = self.state, self._channel.next
        if state.unsettled:
            self._complete(state.settle(self._transport.settled))
        entry = take()
        while entry is not None:
            instruction = state.read(entry)
            if isinstance(instruction, Execute):
                self._execute(instruction)
            elif isinstance(instruction, Complete):
                self._end(instruction.handle, instruction.error)
            entry = take()
        if self._to_wake:
            self._wake()

    def _end(self, handle: Handle, error: Exception | None) -> None:
        record = handle.times
        record[STARTED], record[SEQUENCE], record[TOGETHER] = now(), self.state.sequence, 1
        if error is not None:
            self._fail(handle, error)
            return
        record[ENDED] = now()
        handle.finish()

    def _execute(self, execute: Execute) -> None:
        state, batch, notes = self.state, execute.batch, execute.notes
        entry, first = batch[0]
        handles = [first] if len(batch) == 1 else [handle for _, handle in batch]
        started, sequence, together = now(), state.sequence, len(handles)
        for handle in handles:
            record = handle.times
            record[STARTED], record[SEQUENCE], record[TOGETHER] = started, sequence, together
        if self._to_wake:
            # An operation whose data came with its requests is fast and never blocks: do a few more before waking.
            self._delayed += 1
            if not notes or self._delayed >= _MOST_DELAYED:
                self._wake()
        members = entry.response.members
        state.executing = handles
        try:
            for handle in handles:
                if handle.transfer is not None:
                    handle.transfer.before()
            fence = self._transport.run(sequence, batch, notes)
        except BaseException as error:
            if len(members) == 1 and isinstance(error, Exception):
                for handle in handles:  # no other rank takes part, so only these fail
                    self._fail(handle, error)
                return
            for handle in handles:
                state.put_back(handle)
            raise
        finally:
            state.executing = []
        if entry.splits:
            first.received_splits = tuple(row[entry.me] for row in entry.splits)
        if fence:
            state.unsettled.append((fence, members, handles))
        else:
            self._complete(handles)

    def _complete(self, handles: list[Handle]) -> None:
        ended = now()
        for handle in handles:
            handle.times[ENDED] = ended
            handle.finish(None if handle.transfer is None else handle.deliver(), wake=False)
            if handle.waiters:
                # Wake it later: now it would have to wait for the interpreter until this thread is idle.
                self._to_wake.append(handle)

    def _fail(self, handle: Handle, error: Exception) -> None:
        self._transport.skip(handle)
        handle.finish(error)

    def _wake(self) -> None:
        """Wake the threads that wait for finished operations."""
        self._delayed = 0
        for handle in self._to_wake:
            handle.wake()
        self._to_wake.clear()

    def goal(self) -> int:
        """Return the fence of the oldest operation whose end is not known, or 0."""
        unsettled = self.state.unsettled
        return unsettled[0][0] if unsettled else 0

    # -- the other ranks -----------------------------------------------------------------------------------------

    def tick(self, waited_s: float) -> None:
        """Check the other ranks; raise when waiting is pointless."""
        if self._watch is not None and self.state.failure is None:
            self._watch.tick(self, self._channel, waited_s)
        self._transport.rest()

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done."""
        return self.state.in_flight()

    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return self.state.is_idle()

    def is_quiet(self) -> bool:
        """Whether nothing is in flight, here or, at home, anywhere; and no question about a stall is open."""
        if not self.state.is_idle() or self._observer.is_busy:
            return False
        coordinator = self._link.coordinator
        return coordinator is None or not coordinator.is_waiting

    def late(self) -> int:
        """Return a rank that has not done its part of an operation while this rank has; -1 if there is none."""
        for fence, members, _ in self.state.unsettled:
            for rank in members:
                if not self._transport.settled((rank,), fence):
                    return rank
        return -1

    def attend(self) -> None:
        """Answer other ranks' questions; on any thread."""
        try:
            self._observer.attend()
        except BaseException as error:
            self.abandon(error)

    # -- failing and leaving -------------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """Fail for good: this rank cannot keep in step with the log any more."""
        failure = self.state.fail(error)
        if failure is None:
            return
        self._log_has_news = lambda: False  # this rank ignores the log from now on
        if not self._is_announced:
            link = self._link
            if link.board is not None:
                link.board.give_reason(encode_reason(failure, str(failure)))
            self._observer.failed(failure)
            if link.peers is not None:
                link.peers.fail(self.culprit)
        self.sweep()

    def sweep(self) -> None:
        """Fail all operations in flight; any thread may call this once the engine's thread has ended."""
        for handle in self.state.clear():
            self._fail(handle, self.state.error())

    def conclude(self) -> None:
        """Send the last messages of the observer while the other ranks are still connected."""
        self._observer.conclude()

    def leave(self, reason: str) -> None:
        """Leave the job and tell the other ranks why; operations in flight here fail."""
        link, state = self._link, self.state
        if state.failure is None:
            if link.coordinator is not None:
                # The ranks that wait for this one get the reason through the log, before the coordinator is gone.
                self.step(awaited=False)
            link.channel.leave(reason)
            if link.coordinator is not None:
                self.advance()
            self.announce(reason)
            state.failure = errors.NotInitializedError(LEFT)
        self.sweep()

    def announce(self, reason: str) -> None:
        """Tell the other ranks, outside the log, that this rank has left; any thread may call this.

        Blocks while the engine's thread announces its end or closes the board; both have time limits of their own.
        """
        link = self._link
        with self._parting:
            if self._has_parted:
                return
            self._is_announced = True
            if link.board is not None:
                link.board.give_reason(encode_reason(None, reason))
            if link.peers is not None:
                link.peers.leave(self.culprit)

    def close(self) -> None:
        """Release the resources that this rank shares with the others."""
        link = self._link
        self._observer.close()
        with self._parting:
            self._has_parted = True
            if link.board is not None:
                link.board.close()
        link.transport.close()
        if link.peers is not None:
            link.peers.close()
