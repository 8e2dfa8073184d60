"""The control page: a few words that show the ranks of one host each other's progress.

One memfd, mapped by all. Here, ranks are numbered from 0 on each host, not as in the job; rank 0 serves the
others: it reads their requests, and writes their log. Each word has exactly one writer, and its own cache line:

    per rank    FLAG      how far this rank is in the log: sequence << 24 | phase; only grows
                BELL      a futex word; a rank that wants this one to look rings it
                MODE      0 awake, else the channel its sleeper listens on
                STATE     starting, running, left, failed; and the rank that caused it
                LOG_TAIL  how far this rank has read the log
                REQ_HEAD, REQ_TAIL   its request ring: written by the rank, read by rank 0
                GOAL      the flag value that all must reach before this rank's sleeper needs waking
                CLEAR     whether readers overwrite this rank's data; see `Clearing`
    once        LOG_HEAD  written by rank 0
                ROUNDS    how far staged collectives go between two meetings; written by rank 0 before any of them
    then        one request ring per rank, and the log ring

Lost wake-ups are excluded as in any futex protocol: the sleeper announces itself in MODE, fences, looks
once more and sleeps only if BELL did not change; the ringer stores its news, bumps BELL, fences, and then
reads MODE. A sleeper also wakes when a peer dies (``links.shm.peers``), and every 100 ms in any case.
"""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Sequence

from horovod.transports.shm import futex
from horovod.transports.shm.mapping import map_shared

__all__ = [
    "HOLDER",
    "NO_GOAL",
    "PARKED",
    "PHASE_BITS",
    "Control",
    "Presence",
]

#: Channel of the thread that holds the engine's lock and waits for a peer.
HOLDER = 2
#: Channel of the background thread, parked while it is not needed.
PARKED = 1
PHASE_BITS = 24
#: Goal of a sleeper that waits for no flag.
NO_GOAL = (1 << 64) - 1

_LINE = 64
_LINES_PER_RANK = 9
_FLAG, _BELL, _MODE, _STATE, _LOG_TAIL, _REQ_HEAD, _REQ_TAIL, _GOAL, _CLEAR = range(_LINES_PER_RANK)
REQUEST_RING_BYTES = 64 << 10
LOG_RING_BYTES = 1 << 20


class Presence(enum.IntEnum):
    """The state that a rank has announced."""

    STARTING = 0
    RUNNING = 1
    LEFT = 2
    FAILED = 3


class Control:
    """One rank's view of the control page; rank and size are those on this host. The memfd stays the caller's."""

    def __init__(self, fd: int, rank: int, size: int, cores: int | None = None) -> None:
        self.rank = rank
        self.size = size
        # number of cores on which all ranks together may run
        self.cores = len(os.sched_getaffinity(0)) if cores is None else cores
        # whether ranks share cores; then a waiting thread should yield its core at once
        self.crowded = size > self.cores
        self.share = max(1, self.cores // size)  # number of cores for each rank, at least 1
        self.polite = True  # whether a waiting thread looks for a while before it sleeps; see `Spinner`
        self._deferred: set[int] = set()
        nbytes = self.nbytes(size)
        self._map = map_shared(fd, nbytes)
        whole = memoryview(self._map)
        stride = _LINE * _LINES_PER_RANK
        header = whole[: stride * size + _LINE]
        self.words64 = header.cast("Q")
        self.words32 = header.cast("I")
        self._anchor = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(self._anchor)
        self.flag = [(r * stride + _FLAG * _LINE) // 8 for r in range(size)]
        self.state = [(r * stride + _STATE * _LINE) // 8 for r in range(size)]
        self.log_tail = [(r * stride + _LOG_TAIL * _LINE) // 8 for r in range(size)]
        self.request_head = [(r * stride + _REQ_HEAD * _LINE) // 8 for r in range(size)]
        self.request_tail = [(r * stride + _REQ_TAIL * _LINE) // 8 for r in range(size)]
        self.goal = [(r * stride + _GOAL * _LINE) // 8 for r in range(size)]
        self.clears = [(r * stride + _CLEAR * _LINE) // 8 for r in range(size)]
        self.log_head = stride * size // 8
        self._rounds = self.log_head + 1
        if rank == 0:
            self.words64[self._rounds] = self.crowded
        self.bell = [(r * stride + _BELL * _LINE) // 4 for r in range(size)]
        self.mode = [(r * stride + _MODE * _LINE) // 4 for r in range(size)]
        self._bell_address = [base + r * stride + _BELL * _LINE for r in range(size)]
        rings = stride * size + _LINE
        self.request_rings = [
            whole[rings + r * REQUEST_RING_BYTES : rings + (r + 1) * REQUEST_RING_BYTES].cast("I") for r in range(size)
        ]
        log = rings + size * REQUEST_RING_BYTES
        self.log_ring = whole[log : log + LOG_RING_BYTES].cast("I")

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes that a control page for ``size`` ranks takes."""
        return _LINE * _LINES_PER_RANK * size + _LINE + size * REQUEST_RING_BYTES + LOG_RING_BYTES

    @property
    def has_large_rounds(self) -> bool:
        """Whether to meet seldom, because each meeting costs switches between processes; the same for all ranks."""
        return bool(self.words64[self._rounds])

    def ring(self, rank: int) -> None:
        """Make ``rank`` look at its rings and at the flags, now; it sees everything that was stored before."""
        words = self.words32
        bell = self.bell[rank]
        words[bell] = (words[bell] + 1) & 0xFFFFFFFF
        futex.fence()
        mode = words[self.mode[rank]]
        if mode:
            futex.wake(self._bell_address[rank], mode)

    def rouse(self, rank: int) -> None:
        """Ring for every sleeping thread of ``rank``, also for one that is parked."""
        words, bell = self.words32, self.bell[rank]
        words[bell] = (words[bell] + 1) & 0xFFFFFFFF
        futex.fence()
        futex.wake(self._bell_address[rank], HOLDER | PARKED)

    def ring_all(self, ranks: Sequence[int]) -> None:
        """Do ``ring`` for every one of ``ranks``, with one fence for all."""
        words, bells, modes = self.words32, self.bell, self.mode
        for rank in ranks:
            bell = bells[rank]
            words[bell] = (words[bell] + 1) & 0xFFFFFFFF
        futex.fence()
        for rank in ranks:
            mode = words[modes[rank]]
            if mode:
                futex.wake(self._bell_address[rank], mode)

    def ring_later(self, ranks: Sequence[int]) -> None:
        """Do ``ring`` for those of ``ranks`` that sleep for lack of news; defer it for ranks between two calls.

        A rank that is about to wait calls this: the others most likely come by themselves, and waking their
        background threads would only delay them. ``ring_deferred`` must follow; it also finds a rank that went to
        sleep at this moment, so this needs no fence.
        """
        words, modes = self.words32, self.mode
        for rank in ranks:
            if words[modes[rank]] & HOLDER:
                self.ring(rank)
            else:
                self._deferred.add(rank)

    def ring_deferred(self) -> None:
        """Do ``ring`` for deferred ranks that did not look; call before this rank sleeps or does other work.

        This orders earlier stores before later loads, even if there is no rank to ring.
        """
        # Other threads may defer and ring meanwhile.
        deferred, self._deferred = self._deferred, set()
        self.ring_all([rank for rank in deferred if self._is_behind(rank)])

    def _is_behind(self, rank: int) -> bool:
        words, me = self.words64, self.rank
        if rank == 0:
            return bool(words[self.request_tail[me]] != words[self.request_head[me]])
        return bool(words[self.log_tail[rank]] != words[self.log_head])

    def post(self, value: int, members: Sequence[int]) -> None:
        """Advance this rank's flag to ``value``, and wake the ``members`` that sleep until all have reached it.

        These are all members of the present entry; the last one to come wakes the sleepers. Empty if no rank can be
        waiting for this value.
        """
        rank = self.rank
        if not futex.is_strongly_ordered:
            futex.fence()
        self.words64[self.flag[rank]] = value
        if not members:
            return
        futex.fence()
        words, modes = self.words32, self.mode
        for member in members:
            # A parked background thread is not waiting for flags; only lock holders are.
            if words[modes[member]] & HOLDER and member != rank and self._have_come(members, self.goal[member]):
                self.ring(member)

    def _have_come(self, members: Sequence[int], goal: int) -> bool:
        if not futex.is_strongly_ordered:
            futex.fence()
        words, flags = self.words64, self.flag
        value = words[goal]
        for member in members:  # noqa: SIM110  a generator costs more than the look
            if words[flags[member]] < value:
                return False
        return True

    def announce(self, goal: int) -> None:
        """Announce that the lock's holder is going to sleep, until its bell rings or all flags have reached ``goal``.

        Check the awaited condition once more before sleeping.
        """
        self.words64[self.goal[self.rank]] = goal
        if not futex.is_strongly_ordered:
            futex.fence()
        self.words32[self.mode[self.rank]] = HOLDER
        futex.fence()

    def sleep(self, bell: int, timeout_s: float, channel: int) -> bool:
        """Sleep until this rank's bell is no longer ``bell``; False when the time ran out."""
        return futex.wait(self._bell_address[self.rank], bell, timeout_s, channel)

    def state_of(self, rank: int) -> Presence:
        """Return the state that ``rank`` last announced."""
        return Presence(self.words64[self.state[rank]] & 0xFF)

    def cause_of(self, rank: int) -> int:
        """Return the rank of the job because of which ``rank`` left or failed; -1 if it named none."""
        return int(self.words64[self.state[rank]] >> 8) - 1

    def set_state(self, state: Presence, cause: int = -1) -> None:
        """Announce this rank's state, and the rank of the job that caused it, and make all ranks look."""
        self.words64[self.state[self.rank]] = state | (cause + 1) << 8
        for rank in range(self.size):
            self.ring(rank)

    def close(self) -> None:
        """Unmap the page."""
        del self._anchor
        for view in (self.words64, self.words32, self.log_ring, *self.request_rings):
            view.release()
        self._map.close()
