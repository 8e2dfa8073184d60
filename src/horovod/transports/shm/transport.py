"""All ranks of one host, over memory that they share.

Four ways for an allreduce, chosen by where the data lies:

    inline   small tensors are sent with the request; when the entry is in the log, every rank reads all of
             them and reduces by itself: no further synchronisation at all
    arena    tensors that live in the arena: rank r reduces its 1/n slice over all arenas, block by block
             in cache, and writes it to all; one synchronisation, 2N bytes of memory traffic per rank
    direct   each of two ranks reduces one half and writes it to both results, which are new and lie in the arena;
             allgather and alltoall write to the results of all in the same way
    staged   ordinary tensors pass in chunks through staging buffers, filled one chunk ahead
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any

from horovod.core.requests import NO_NOTE, Kind, ReduceOp, Request
from horovod.transports.base import Entry, Transport, Watch, Work, sum_class
from horovod.transports.libraries import kernels_named, on_one_thread
from horovod.transports.local import run_alone
from horovod.transports.results import LEAST_BYTES
from horovod.transports.shm import adasum, moves, reductions
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.control import PHASE_BITS, Control
from horovod.transports.shm.direct import FRESH, allreduce_direct, is_fresh, is_placed
from horovod.transports.shm.flags import DONE, Flags
from horovod.transports.shm.inline import ROUTINES as INLINE
from horovod.transports.shm.inline import Plan
from horovod.transports.shm.reuse import Recurring
from horovod.transports.shm.slots import Sender, SlotRing
from horovod.transports.shm.staged import allreduce_staged
from horovod.transports.shm.staging import Staging

__all__ = ["ROUTINES", "ShmTransport", "inline_limit"]

_logger = logging.getLogger("horovod")

#: Above this size, tensors in the arena are better reduced there; the limit is higher if ranks share cores, since that
#: takes one more meeting.
_ARENA_BYTES, _CROWDED_ARENA_BYTES = 4 << 10, 64 << 10
#: From this size on, two ranks with new result tensors gain more by reducing one half each than they lose by meeting.
_FRESH_BYTES = LEAST_BYTES


def inline_limit(size: int, kind: Kind) -> int:
    """Return the bytes above which tensors are not sent inline: the more ranks, the more each has to read."""
    if size <= 2 and kind is Kind.ALLREDUCE:
        return 4 << 20
    return 512 << 10 if size <= 4 else 64 << 10


class ShmTransport(Transport):
    """See ``Transport``."""

    name = "shm"
    is_awaited = False
    fresh: tuple[int, ...] = (FRESH,)

    def __init__(self, control: Control, arenas: Sequence[Arena], watch: Watch) -> None:
        self.control = control
        self.rank = control.rank
        self.arenas = arenas
        self.arena = arenas[control.rank]
        self.flags = Flags(control, watch)
        self.results = self.arena.results
        self.staging = Staging(self.flags, arenas, self.results)
        self._slots = SlotRing(self.flags)
        self._has_advised = False
        self._arena_limit = _CROWDED_ARENA_BYTES if control.crowded else _ARENA_BYTES

    def takes(self, device: str, kind: Kind, op: ReduceOp, dtypes: Sequence[str]) -> bool:
        return False

    def allocate(self, nbytes: int) -> Any:
        return self.arena.allocate(nbytes)

    def place(self, addresses: Sequence[int]) -> tuple[int, ...]:
        offsets = tuple(map(self.arena.offset_of, addresses))
        return () if -1 in offsets else offsets

    def fuse_class(self, request: Request) -> str:
        return "" if is_placed(request) or request.device != "cpu" else sum_class(request)

    def inline(self, kernels: str, request: Request, members: int) -> Sender | None:
        if request.kind not in INLINE or request.op is ReduceOp.ADASUM or request.device != "cpu" or members < 2:
            return None
        sender = Sender(self.arena, self.staging.budget, self.rank, kernels, request, members)
        is_fresh = members == 2 and request.placement == self.fresh * len(request.tensors)
        if is_fresh and request.kind is Kind.ALLREDUCE and sender.nbytes >= _FRESH_BYTES and not self.control.crowded:
            # On the staged route, each rank reads only a part of the other input.
            return None
        limit = inline_limit(self.control.size, request.kind)
        return sender if sender.nbytes <= (self._arena_limit if is_placed(request) else limit) else None

    def offer(self, work: Work, inline: Sender) -> int:
        note = self._slots.take(work, inline)
        if note == NO_NOTE:
            return note
        began = monotonic_ns() if inline.is_timed else 0
        if inline.is_large and self._has_too_many_threads(work):
            with on_one_thread(kernels_named(work.kernels)):
                inline.send(work, note)
        else:
            inline.send(work, note)
        if began:
            self.staging.clearing.note(inline.nbytes, monotonic_ns() - began)
        return note

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], notes: tuple[int, ...]) -> int:
        entry, work = batch[0]
        done = sequence << PHASE_BITS | DONE
        members = entry.response.members
        if entry.most_bytes >= LEAST_BYTES or len(batch) > 1:
            for _, one in batch:
                one.lend = self.results.take
        if (entry.is_large or len(batch) > 1) and self._has_too_many_threads(work):
            with on_one_thread(kernels_named(work.kernels)):
                unsettled = self._execute(sequence, batch, notes)
        else:
            unsettled = self._execute(sequence, batch, notes)
        for _, work in batch:
            if work.slot is not None:
                work.slot.readers, work.slot.fence = members, done
        # No rank waits until the others have read an inline message.
        self.control.post(done, () if notes else members)
        return done if unsettled else 0

    def _execute(self, sequence: int, batch: Sequence[tuple[Entry, Work]], notes: tuple[int, ...]) -> bool:
        """Do this rank's part; return whether other members may not have finished theirs."""
        entry, work = batch[0]
        if entry.cache is None:
            entry.cache = Recurring()
        if notes:
            plan = entry.cache.kept.get("inline")
            if plan is None:
                plan = entry.cache.get("inline", lambda: Plan(self.staging, entry, work.kernels))
            plan.run(work, notes)
        elif len(entry.response.members) == 1:
            for entry, work in batch:
                run_alone(entry, work)
        elif len(batch) > 1:
            allreduce_staged(self.staging, sequence, batch)
        else:
            return ROUTINES[entry.response.kind](self.staging, sequence, entry, work)
        return False

    def _has_too_many_threads(self, work: Work) -> bool:
        threads = kernels_named(work.kernels).threads()
        if threads == 1:
            return False
        if not self.is_awaited:
            # While the caller computes, it can spare one core at most.
            return True
        control = self.control
        if threads <= control.share:
            return False
        if control.rank == 0 and not self._has_advised:
            self._has_advised = True
            _logger.warning(
                f"{work.kernels} uses {threads} threads in each of {control.size} ranks, which have {control.cores} "
                f"cores together: computing will be slow. If the script calls torch.set_num_threads, let it choose "
                f"{control.share}; else set OMP_NUM_THREADS={control.share}, as horovodrun does. Collectives keep to "
                "one thread."
            )
        return True

    def settled(self, members: Sequence[int], fence: int) -> bool:
        return self.flags.reached(members, fence)

    def skip(self, work: Work) -> None:
        if work.slot is not None:
            work.slot.readers, work.slot.fence = (), 1

    def rest(self) -> None:
        self.results.rest()

    def close(self) -> None:
        # Entries and plans refer to each other: their views would keep the arenas until Python looks for such cycles.
        self.staging.budget.forget()
        for arena in self.arenas:
            arena.close()
        self.control.close()


def _allreduce(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Reduce; return whether other members may not have finished yet."""
    if entry.response.requests[0].op is ReduceOp.ADASUM:
        adasum.allreduce_adasum(staging, sequence, entry, work)
    elif reductions.lives_in_arena(entry):
        return reductions.allreduce_arena(staging, sequence, entry, work)
    elif is_fresh(entry):
        is_pair = len(entry.response.members) == 2
        if (allreduce_direct if is_pair else reductions.allreduce_fresh)(staging, sequence, entry, work):
            return True
        allreduce_staged(staging, sequence, [(entry, work)], phase=1 if is_pair else 2)
    else:
        allreduce_staged(staging, sequence, [(entry, work)])
    return False


def _barrier(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Do nothing: the log entry itself proves that all members have come."""
    return False


#: Each executes this rank's part of one work whose data was not sent inline, with the staging buffers and the number of
#: the log entry; returns whether the outputs are complete only after all members have done their part.
ROUTINES: dict[Kind, Callable[[Staging, int, Entry, Work], bool]] = {
    Kind.ALLREDUCE: _allreduce,
    Kind.ALLGATHER: moves.allgather,
    Kind.BROADCAST: moves.broadcast,
    Kind.ALLTOALL: moves.alltoall,
    Kind.REDUCESCATTER: reductions.reducescatter,
    Kind.BARRIER: _barrier,
}
