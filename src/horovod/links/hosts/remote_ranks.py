"""The ranks of a job on several hosts, and their state, in memory that the ranks of a host share; its leader writes it.

It lies behind the board, in the same memfd. Once per host:

    ROSTER   0; then 1 if the text is there that lists the ranks of the job, or says why there is no job
    BEAT     when the leader was last known to run, by the clock of the host
    LOST     how many ranks of other hosts have died or failed
    OFFSET   nanoseconds to add to this host's clock to get that of rank 0's host

Per rank of another host: STATE with the rank that caused it, the
kernel's view of its process, and a text that says how it ended.
"""

from __future__ import annotations

import mmap
import select
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from horovod.core.generation import Generation, Member
from horovod.errors import InitError, PeerLostError
from horovod.links.shm.board import ShmBoard
from horovod.links.shm.peers import ShmPeers
from horovod.rendezvous.protocol import HostEntry, Refusal
from horovod.transports.shm import futex
from horovod.transports.shm.control import Control
from horovod.transports.shm.mapping import map_shared

__all__ = ["DEAD", "FAILED", "LEFT", "HostMemory", "RemoteRanks", "Roster", "ended"]

#: States of a rank besides those of ``control.Presence``; LEFT and FAILED are the same there.
LEFT, FAILED, DEAD = 2, 3, 4
_LINE_WORDS = 8
_ROSTER, _ROSTER_BYTES, _BEAT, _LOST, _OFFSET = range(5)
_STATE, _FATE_BYTES, _KERNEL, _CPU_MS = range(4)
_FATE_ROOM = 2 << 10
_ROSTER_ROOM, _ROSTER_ROOM_PER_RANK = 64 << 10, 1 << 10
_POLL_S = 0.002
_HALF = 1 << 63
#: How much longer than the leader the other ranks of a host wait, so that its explanation arrives.
_GRACE_S = 5.0


class RemoteRanks:
    """One rank's view of this memory, which begins at ``offset`` in the memfd; the memfd stays the caller's."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        words = _LINE_WORDS * (1 + size)
        self._fates = words * 8
        self._roster = self._fates + _FATE_ROOM * size
        self._roster_room = _ROSTER_ROOM + _ROSTER_ROOM_PER_RANK * size
        self._map = map_shared(fd, self._roster + self._roster_room, offset)
        self._whole = memoryview(self._map)
        self._words = self._whole[: words * 8].cast("Q")

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the size of this memory in bytes, in whole pages."""
        nbytes = _LINE_WORDS * (1 + size) * 8 + _FATE_ROOM * size + _ROSTER_ROOM + _ROSTER_ROOM_PER_RANK * size
        return -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    # -- the members ---------------------------------------------------------------------------------------------

    def publish(self, message: msgspec.Struct) -> None:
        """Publish the ranks of the job, or why there is no job."""
        text = msgspec.msgpack.encode(message)[: self._roster_room]
        self._whole[self._roster : self._roster + len(text)] = text
        self._words[_ROSTER_BYTES] = len(text)
        futex.fence()
        self._words[_ROSTER] = 1

    def await_roster(self, leader_fd: int, timeout_s: float, check: Callable[[], None]) -> Roster:
        """Return the ranks of the job, as the leader of this host publishes them.

        Raises:
            InitError: there is no job.
            PeerLostError: a rank has ended.
        """
        deadline = time.monotonic() + timeout_s + _GRACE_S
        while not self._words[_ROSTER]:
            check()
            is_lost, is_late = bool(ended([leader_fd])), time.monotonic() > deadline
            if is_lost and not self._words[_ROSTER]:
                raise PeerLostError("the first rank of this host died inside init()", rank=-1)
            if is_late and not self._words[_ROSTER]:
                what = f"did not meet the other hosts within {timeout_s:g} s (HOROVOD_START_TIMEOUT)"
                raise InitError(f"the first rank of this host {what}")
            time.sleep(_POLL_S)
        futex.fence()
        text = bytes(self._whole[self._roster : self._roster + self._words[_ROSTER_BYTES]])
        found = msgspec.msgpack.decode(text, type=Roster | Refusal)
        if isinstance(found, Refusal):
            found.enforce()
        assert isinstance(found, Roster)
        return found

    # -- the others ----------------------------------------------------------------------------------------------

    def set_state(self, rank: int, state: int, cause: int, fate: str) -> None:
        """Set the state of a rank on another host. A rank that has left, failed or died stays so."""
        word = self._word(rank, _STATE)
        if self._words[word] & 0xFF >= LEFT:
            return
        text = fate.encode(errors="backslashreplace")[:_FATE_ROOM]
        start = self._fates + _FATE_ROOM * rank
        self._whole[start : start + len(text)] = text
        self._words[self._word(rank, _FATE_BYTES)] = len(text)
        futex.fence()
        self._words[word] = state | (cause + 1) << 8
        if state >= FAILED:
            self._words[_LOST] += 1

    def state_of(self, rank: int) -> int:
        """Return the state of a rank of another host."""
        return int(self._words[self._word(rank, _STATE)] & 0xFF)

    def cause_of(self, rank: int) -> int:
        """Return the rank that made it leave or fail, or -1."""
        return int(self._words[self._word(rank, _STATE)] >> 8) - 1

    def fate_of(self, rank: int) -> str:
        """Return a text that says how it ended; empty if that is not known."""
        futex.fence()
        start = self._fates + _FATE_ROOM * rank
        return bytes(self._whole[start : start + self._words[self._word(rank, _FATE_BYTES)]]).decode(errors="replace")

    @property
    def lost(self) -> int:
        """How many ranks of other hosts have died or failed."""
        return int(self._words[_LOST])

    def set_kernel(self, rank: int, state: str, cpu_s: float) -> None:
        """Set the kernel's view of a process on another host."""
        self._words[self._word(rank, _CPU_MS)] = max(0, int(cpu_s * 1000))
        self._words[self._word(rank, _KERNEL)] = ord(state)

    def kernel_of(self, rank: int) -> tuple[str, float]:
        """Return the letter of a process's state, ``?`` if unknown, and its seconds of processor time."""
        state = int(self._words[self._word(rank, _KERNEL)])
        return (chr(state) if state else "?"), self._words[self._word(rank, _CPU_MS)] / 1000

    # -- the leader ----------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Record that the leader runs."""
        self._words[_BEAT] = time.monotonic_ns()

    @property
    def silent_s(self) -> float:
        """Seconds since the leader last recorded that it runs."""
        return (time.monotonic_ns() - self._words[_BEAT]) / 1e9

    @property
    def offset_ns(self) -> int:
        """Nanoseconds to add to this host's clock to get that of rank 0's host."""
        word = int(self._words[_OFFSET])
        return word - (1 << 64) if word >= _HALF else word

    @offset_ns.setter
    def offset_ns(self, value: int) -> None:
        self._words[_OFFSET] = value % (1 << 64)

    def close(self) -> None:
        """Unmap this memory."""
        self._words.release()
        self._whole.release()
        self._map.close()

    def _word(self, rank: int, word: int) -> int:
        return _LINE_WORDS + _LINE_WORDS * rank + word


class HostMemory(NamedTuple):
    """Memory that the ranks of a host share."""

    control: Control
    board: ShmBoard
    remote: RemoteRanks
    peers: ShmPeers


class Roster(msgspec.Struct, array_like=True, frozen=True, tag="roster"):
    """The ranks of a job."""

    hosts: list[HostEntry]  # the hosts, rank 0's first
    index: int  # the host that receives this roster
    # endpoint at which that host has reached rank 0's host; on rank 0's host, one at which it was reached
    where: str = ""

    def generation(self, number: int) -> Generation:
        """Return the membership; ``number`` counts the meetings of the job."""
        members = {
            rank: Member(pid, host.hostname)
            for host in self.hosts
            for rank, pid in zip(host.ranks, host.pids, strict=True)
        }
        ranks = [host.ranks for host in self.hosts]
        return Generation([members[rank] for rank in range(len(members))], number=number, hosts=ranks)


def ended(pid_fds: Sequence[int]) -> list[int]:
    """Return the indices of those processes that have ended."""
    poll = select.poll()
    for fd in pid_fds:
        poll.register(fd, select.POLLIN)
    found = {fd for fd, _ in poll.poll(0)}
    return [index for index, fd in enumerate(pid_fds) if fd in found]
