"""All ranks of one host, over memory that they share.

Three ways for an allreduce, chosen by where the data lies:

    inline   small tensors ride in the request; when the entry is in the log, every rank reads all of
             them and reduces by itself: no further synchronisation at all
    arena    tensors that live in the arena: rank r reduces its 1/n slice over all arenas, block by block
             in cache, and writes it to all; one synchronisation, 2N bytes of memory traffic per rank
    staged   ordinary tensors pass in chunks through staging buffers, filled one chunk ahead
"""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any

from horovod.core.requests import NO_TOKEN, Kind, ReduceOp
from horovod.transports.base import Entry, Watch, Work
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.local import run_alone
from horovod.transports.shm import adasum, inline, moves, reductions
from horovod.transports.shm.arena import INLINE_BYTES, Arena
from horovod.transports.shm.control import PHASE_BITS, Control
from horovod.transports.shm.flags import DONE, Flags
from horovod.transports.shm.staging import Staging

__all__ = ["ShmTransport", "inline_limit"]

_ALIGN = 64
_SPINS = 300
#: Views that a signature remembers.
_SLOTS = 64


def inline_limit(size: int) -> int:
    """Return the bytes above which tensors do not ride in the request: the more ranks, the more each has to read."""
    if size <= 2:
        return 512 << 10
    return 256 << 10 if size <= 4 else 64 << 10


class ShmTransport:
    """See ``Transport``.

    Args:
        control: the control page.
        arenas: every rank's arena, by rank.
        watch: called while waiting for a rank.
    """

    name = "shm"

    def __init__(self, control: Control, arenas: Sequence[Arena], watch: Watch) -> None:
        self.control = control
        self.rank = control.rank
        self.arenas = arenas
        self.arena = arenas[control.rank]
        crowded = control.size > len(os.sched_getaffinity(0))
        self.flags = Flags(control, watch, 0 if crowded else _SPINS)
        self.staging = Staging(self.flags, arenas)
        self._inflight: collections.deque[Work] = collections.deque()
        self._bump = 0
        self._limit = inline_limit(control.size)

    def offer(self, work: Work, nbytes: int, slots: dict[int, list[Buffer]]) -> int:
        """Copy small inputs to where every rank can read them; called by the submitting thread, in turn."""
        if nbytes > self._limit:
            return NO_TOKEN
        inflight = self._inflight
        while inflight and inflight[0].fence and self.flags.reached(inflight[0].readers, inflight[0].fence):
            inflight.popleft()
        if not inflight:
            self._bump = 0
        token = self._bump
        end = token + nbytes + _ALIGN * len(work.inputs)
        if end > INLINE_BYTES:
            return NO_TOKEN
        self._bump = end + -end % _ALIGN
        places = slots.get(token)
        if places is None:
            if len(slots) >= _SLOTS:
                slots.clear()
            places = slots[token] = inline.slots(self.arena, work, token)
        copy = kernels_named(work.kernels).copy
        for place, source in zip(places, work.inputs, strict=True):
            copy(place, source)
        inflight.append(work)
        return token

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], tokens: tuple[int, ...]) -> int:
        """Execute one log entry."""
        entry, work = batch[0]
        members = entry.response.members
        unsettled = False
        if len(members) == 1:
            for entry, work in batch:
                run_alone(entry, work)
        elif len(batch) > 1:
            reductions.allreduce_staged(self.staging, sequence, batch)
        elif tokens and NO_TOKEN not in tokens and entry.response.kind in inline.KINDS:
            inline.run(self.arenas, entry, work, tokens)
        else:
            unsettled = _RUNNERS[entry.response.kind](self.staging, sequence, entry, work) is True
        done = sequence << PHASE_BITS | DONE
        for _, work in batch:
            work.readers = members
            work.fence = done
        self.flags.post(done, members)
        return done if unsettled else 0

    def settled(self, members: Sequence[int], fence: int) -> bool:
        """Whether all ``members`` have done their part."""
        return self.flags.reached(members, fence)

    def skip(self, work: Work) -> None:
        """Free what rode along with a work that nobody will read."""
        work.readers = ()
        work.fence = 1

    def close(self) -> None:
        """Unmap the control page and the arenas."""
        self._inflight.clear()
        for arena in self.arenas:
            arena.close()
        self.control.close()


def _allreduce(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Reduce; return whether the others may not be through yet."""
    if entry.response.requests[0].op is ReduceOp.ADASUM:
        adasum.allreduce_adasum(staging, sequence, entry, work)
    elif reductions.lives_in_arena(entry):
        return reductions.allreduce_arena(staging, sequence, entry, work)
    else:
        reductions.allreduce_staged(staging, sequence, [(entry, work)])
    return False


def _barrier(staging: Staging, sequence: int, entry: Entry, work: Work) -> None:
    """The log entry itself proves that everybody has come."""


_RUNNERS: dict[Kind, Any] = {
    Kind.ALLREDUCE: _allreduce,
    Kind.ALLGATHER: moves.allgather,
    Kind.BROADCAST: moves.broadcast,
    Kind.ALLTOALL: moves.alltoall,
    Kind.REDUCESCATTER: reductions.reducescatter,
    Kind.BARRIER: _barrier,
}
