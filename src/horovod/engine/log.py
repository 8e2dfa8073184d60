"""Run the log: match each entry with what this rank submitted, execute it, and hand out the result.

Threads that submit only ever append to the inbox; all else belongs to the engine's own thread, which no signal
interrupts. So wherever a caller is interrupted, a submission has been handed over, or it has not.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable

from horovod import errors
from horovod.core.coordinator import Run
from horovod.core.mismatch import describe_waiting
from horovod.core.process_sets import ProcessSetTable
from horovod.core.requests import NO_NOTE, Kind, Response
from horovod.engine.answers import to_exception
from horovod.engine.handles import Handle
from horovod.engine.outstanding import Outstanding
from horovod.engine.ports import Channel
from horovod.engine.records import ENDED, SEQUENCE, STARTED, TOGETHER, new_ring, now
from horovod.engine.signatures import SignatureTable
from horovod.transports.base import Entry, Transport

__all__ = ["LogRunner"]

#: How many small operations are executed before who waits for the first is woken, which may cost as much as ten.
_MOST_DELAYED = 64


class LogRunner:
    """What this rank has in flight, and how far it is in the log.

    Args:
        rank: this rank.
        channel: where the log comes from.
        transport: moves the bytes.
        sets: the process sets.
        signatures: numbers of the requests.
        owns_sets: whether log entries change ``sets`` here; on rank 0 the coordinator does.

    Attributes:
        inbox: what was handed in, and not taken over yet.
        ring: the records of all operations.
        culprit: the rank that the log last named as lost, or -1.
        fused: how many operations were executed together with others.
        fusions: how many executions these took.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel,
        transport: Transport,
        sets: ProcessSetTable,
        signatures: SignatureTable,
        owns_sets: bool,
    ) -> None:
        self._rank = rank
        self._channel = channel
        self._transport = transport
        self._sets = sets
        self._signatures = signatures
        self._owns_sets = owns_sets
        self._entries: dict[int, Entry] = {}
        self._outstanding = Outstanding()
        self._sequence = 0
        self._unsettled: collections.deque[tuple[int, tuple[int, ...], list[Handle]]] = collections.deque()
        self.inbox: collections.deque[Handle] = collections.deque()
        self.ring = new_ring()
        self._to_wake: list[Handle] = []
        self._delayed = 0
        self.culprit = -1
        self.fused = self.fusions = 0

    @property
    def sequence(self) -> int:
        """How many entries this rank has executed or skipped, the present one included."""
        return self._sequence

    def submit(self, handle: Handle) -> None:
        """Hand a submission over to the engine; called by any thread, which may be interrupted anywhere in it.

        Raises:
            DuplicateNameError: a tensor of this name is in flight.
        """
        name = handle.signature.name
        try:
            if name is not None and (other := self._outstanding.named.setdefault(name, handle)) is not handle:
                self._transport.skip(handle)
                raise errors.DuplicateNameError(
                    f"a tensor named {name[1].partition('.')[2]!r} is still in flight, submitted at "
                    f"{other.signature.request.site}; synchronize() it first, or give this one another name"
                )
            # This one step decides. What is in the inbox is the engine's, and nothing but the engine changes the rest.
            self.inbox.append(handle)
            self.ring.append(handle.record)
        except BaseException:
            self._withdraw(handle)
            raise

    def _withdraw(self, handle: Handle) -> None:
        """Undo ``submit``, as far as it has come, unless the engine has taken the submission over already."""
        with contextlib.suppress(ValueError):
            self.inbox.remove(handle)
            handle.accepted = False
        name = handle.signature.name
        if not handle.accepted and name is not None and self._outstanding.named.get(name) is handle:
            del self._outstanding.named[name]

    def accept(self, patient: bool) -> None:
        """Take over what was handed in, in this order, and tell the coordinator.

        Args:
            patient: whether somebody waits for a result, so that others need not be woken at once.
        """
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
            signature = handle.signature
            if signature.id < 0:
                self._signatures.declare(handle)
            signature.in_flight += 1
            signature.uses += 1
            inline = signature.inline
            try:
                note = NO_NOTE if inline is None else self._transport.offer(handle, inline)
            except Exception as error:  # there was no memory for the copy; nobody else knows of it yet
                if signature.name is not None:
                    del self._outstanding.named[signature.name]
                self._transport.skip(handle)
                handle.finish(error)
                continue
            if signature.name is None:
                self._outstanding.add_unnamed(handle)
            self._channel.submit(signature.id, note, patient)

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done; for any thread, at any moment."""
        found = [handle for _, _, handles in list(self._unsettled) for handle in handles]
        found += self._outstanding.handles()
        return found + [handle for handle in list(self.inbox) if handle.signature.name is None]

    def describe(self, handle: Handle) -> str:
        """Return a submission in words."""
        request = handle.signature.request
        return describe_waiting(request, self._signatures.count(request)[0])

    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        outstanding = self._outstanding
        return not (self.inbox or outstanding.named or outstanding.unnamed or self._unsettled)

    def has_news(self) -> bool:
        """Whether ``accept`` or ``step`` has something to do."""
        if self.inbox or self._channel.has_news():
            return True
        unsettled = self._unsettled
        return bool(unsettled) and self._transport.settled(unsettled[0][1], unsettled[0][0])

    def has_submissions(self) -> bool:
        """Whether ``accept`` has something to do."""
        return bool(self.inbox)

    def goal(self) -> int:
        """Return the flag that the oldest operation whose end is not known waits for, or 0."""
        return self._unsettled[0][0] if self._unsettled else 0

    def late(self) -> int:
        """Return a rank that does not come to the end of what this one has done its part of, or -1."""
        for fence, members, _ in self._unsettled:
            for rank in members:
                if not self._transport.settled((rank,), fence):
                    return rank
        return -1

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End every submission with an exception of its own."""
        handles = self.in_flight()
        self._unsettled.clear()
        self._outstanding.clear()
        # One by one: what another thread submits at this moment must not get lost.
        with contextlib.suppress(IndexError):
            while True:
                handle = self.inbox.popleft()
                if handle.signature.name is not None:
                    self._outstanding.named.pop(handle.signature.name, None)
                handles.append(handle)
        for handle in handles:
            self._transport.skip(handle)
            handle.finish(make_error())

    def step(self) -> None:
        """Execute what the log holds.

        Raises:
            HorovodInternalError: an entry could not be executed; this rank is out of step for good.
        """
        if self._unsettled:
            self._settle()
        take = self._channel.next
        entry = take()
        while entry is not None:
            if isinstance(entry, Run):
                self._sequence += 1
                self._execute(entry)
            else:
                self._entries[entry.id] = Entry(entry.response, self._rank)
            entry = take()
        if self._to_wake:
            self.wake()

    def _settle(self) -> None:
        """Finish what this rank had done its part of, as soon as the others have done theirs."""
        for _ in range(len(self._unsettled)):
            fence, members, handles = self._unsettled.popleft()
            if not self._transport.settled(members, fence):
                self._unsettled.append((fence, members, handles))
                continue
            ended = now()
            for handle in handles:
                self._finish(handle, ended)

    def _finish(self, handle: Handle, ended_ns: int) -> None:
        handle.record[ENDED] = ended_ns
        handle.finish(None if handle.transfer is None else handle.deliver(), wake=False)
        if handle.waiters:
            # Who is woken now would have to wait for the interpreter until this thread has nothing more to do.
            self._to_wake.append(handle)

    def wake(self) -> None:
        """Wake who waits for what is done."""
        self._delayed = 0
        for handle in self._to_wake:
            handle.wake()
        self._to_wake.clear()

    def _execute(self, run: Run) -> None:
        # Fused entries have the same members, so this rank takes part in all or in none.
        ids, sequence = run.ids, self._sequence
        entry = self._entries[ids[0]]
        if entry.me < 0:
            return
        handle = self._outstanding.match(entry)
        batch = [(entry, handle)]
        record = handle.record
        record[STARTED], record[SEQUENCE], record[TOGETHER] = now(), sequence, len(ids)
        if len(ids) > 1:
            self._join_in(ids, batch)
        if not entry.is_data:
            self._answer(entry.response, handle)
            return
        if self._to_wake:
            # What was sent along is done in no time, and nobody blocks: who waits finds more of it done.
            self._delayed += 1
            if not run.notes or self._delayed >= _MOST_DELAYED:
                self.wake()
        self._carry_out(entry, batch, run.notes)

    def _carry_out(self, entry: Entry, batch: list[tuple[Entry, Handle]], notes: tuple[int, ...]) -> None:
        handle = batch[0][1]
        try:
            if handle.transfer is not None or len(batch) > 1:
                for _, one in batch:
                    if one.transfer is not None:
                        one.transfer.before()
            fence = self._transport.run(self._sequence, batch, notes)
        except BaseException as error:
            if len(entry.response.members) == 1 and isinstance(error, Exception):
                # Nobody else is out of step: only what failed fails.
                for _, one in batch:
                    self._transport.skip(one)
                    one.finish(error)
                return
            for _, one in batch:
                self._outstanding.put_back(one)
            raise
        if entry.splits:
            handle.received_splits = tuple(row[entry.me] for row in entry.splits)
        if fence:
            self._unsettled.append((fence, entry.response.members, [one for _, one in batch]))
        elif len(batch) == 1:
            self._finish(handle, now())
        else:
            ended = now()
            for _, one in batch:
                self._finish(one, ended)

    def _join_in(self, ids: tuple[int, ...], batch: list[tuple[Entry, Handle]]) -> None:
        """Add what is executed together with the first."""
        started, sequence, together = batch[0][1].record[STARTED], self._sequence, len(ids)
        for key in ids[1:]:
            entry = self._entries[key]
            handle = self._outstanding.match(entry)
            record = handle.record
            record[STARTED], record[SEQUENCE], record[TOGETHER] = started, sequence, together
            batch.append((entry, handle))
        self.fused += together
        self.fusions += 1

    def _answer(self, response: Response, handle: Handle) -> None:
        if response.error:
            self._transport.skip(handle)
            handle.finish(self._error(response, handle))
            return
        request = response.requests[0]
        handle.result = response.result
        if response.kind is Kind.ADD_PROCESS_SET and self._owns_sets:
            self._sets.add(request.ranks)
        elif response.kind is Kind.REMOVE_PROCESS_SET and self._owns_sets:
            self._sets.remove(request.root)
        handle.record[ENDED] = now()
        handle.finish()

    def _error(self, response: Response, handle: Handle) -> Exception:
        error = to_exception(response, self._rank, lambda: self.describe(handle))
        if isinstance(error, errors.PeerLostError):
            self.culprit = error.rank
        return error
