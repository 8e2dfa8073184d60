"""Detects the death and the departure of the other ranks of this host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from horovod.core.generation import Generation
from horovod.core.labels import LEFT
from horovod.engine.ports import Peers
from horovod.errors import HorovodInternalError
from horovod.rendezvous.endings import signal_name
from horovod.transports.shm.control import Control, Presence
from horovod.world import process_status

__all__ = ["EndWatch", "ShmPeers", "process_state"]

# struct pidfd_info of ioctl PIDFD_GET_INFO, Linux 6.13; the exit code since 6.15.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3
# If /proc hides the exit code, the parent's report is awaited for this long.
_COLLECT_TRIES, _COLLECT_PAUSE_S = 100, 0.005
# Place of the exit code among the words of /proc/<pid>/stat from the state on.
_STATUS_CODE = 49


class ShmPeers(Peers):
    """The other ranks of this host, as processes; see ``Peers``. ``pid_fds`` are owned from now on, and like ``ranks``
    in the order of the control page.
    """

    def __init__(self, control: Control, generation: Generation, ranks: Sequence[int], pid_fds: Sequence[int]) -> None:
        self._control = control
        self._size = generation.size
        self._describe = generation.describe
        self._rank = ranks[control.rank]
        self._indices = {rank: index for index, rank in enumerate(ranks)}
        self.fds = dict(zip(ranks, pid_fds, strict=True))  # pidfds, by rank
        self._pids = [member.pid for member in generation.members]
        self._poll = select.poll()
        for rank, fd in self.fds.items():
            if rank != self._rank:
                self._poll.register(fd, select.POLLIN)
        self._watch: EndWatch | None = None
        self._has_end = False
        self._seen: list[int] = []

    def enter(self) -> None:
        self._control.set_state(Presence.RUNNING)
        self._watch = EndWatch([fd for rank, fd in self.fds.items() if rank != self._rank], self._note_end)

    def leave(self, culprit: int) -> None:
        self._control.set_state(Presence.LEFT, culprit)

    def fail(self, culprit: int) -> None:
        self._control.set_state(Presence.FAILED, culprit)

    def is_alarmed(self) -> bool:
        return self._has_end or self._states() != self._seen

    def has_left(self, rank: int) -> bool:
        return self._state_of(rank) is Presence.LEFT

    def has_failed(self, rank: int) -> bool:
        return self._state_of(rank) is Presence.FAILED

    def gone(self) -> int | None:
        """Return a rank that died, or failed, without leaving properly; None while all is well.

        If a rank failed because of another rank, return the other one.

        Raises:
            HorovodInternalError: something in this process has closed descriptors of this package.
        """
        self._has_end, self._seen = False, self._states()  # first of all: any later change is another alarm
        ended = self._ended(self._poll)
        for rank, fd in self.fds.items():
            state = self._state_of(rank)
            if rank != self._rank and (state is Presence.FAILED or (fd in ended and state is not Presence.LEFT)):
                return self.culprit_of(rank)
        return None

    def culprit_of(self, rank: int) -> int:
        for _ in range(self._size):
            cause = self._cause_of(rank)
            if cause < 0 or cause == rank:
                break
            rank = cause
        return rank

    def _note_end(self) -> None:
        self._has_end = True
        self._control.rouse(self._control.rank)

    def _states(self) -> list[int]:
        """Return words that change when a rank fails or leaves."""
        control = self._control
        return [control.words64[index] for index in control.state]

    def _state_of(self, rank: int) -> Presence:
        return self._control.state_of(self._indices[rank])

    def _cause_of(self, rank: int) -> int:
        return self._control.cause_of(self._indices[rank])

    def has_ended(self, rank: int) -> bool:
        poll = select.poll()
        poll.register(self.fds[rank], select.POLLIN)
        return bool(self._ended(poll))

    def _ended(self, poll: select.poll) -> set[int]:
        """Return the pidfds of processes that have ended.

        Raises:
            HorovodInternalError: a descriptor is not ours any more; this says nothing about a process.
        """
        ended = set()
        for fd, events in poll.poll(0):
            if events & select.POLLNVAL or not _is_pidfd(fd):
                raise HorovodInternalError(
                    f"other code in the process of {self._describe(self._rank)} has closed file descriptor {fd}, so "
                    "this rank cannot watch the other ranks any more; no rank has died. Look for os.closerange(), "
                    "os.close() or a library that closes descriptors that it has not opened"
                )
            ended.add(fd)
        return ended

    def fate(self, rank: int, why: str = "") -> str:
        who = self._describe(rank)
        state = self._state_of(rank)
        if state is Presence.FAILED:
            return f"{who} failed: {why}" if why else f"{who} failed; its own error stands in its output"
        if state is Presence.LEFT and why:
            return why
        if state is Presence.LEFT or not self.has_ended(rank):
            return f"{who} {LEFT}"
        code = self._exit_code(rank)
        if code is None:
            return f"{who} died"
        if os.WIFSIGNALED(code):
            return f"{who} was killed by {signal_name(os.WTERMSIG(code))}"
        return f"{who} exited with code {os.WEXITSTATUS(code)} without hvd.shutdown()"

    def process(self, rank: int) -> tuple[str, float]:
        return process_state(self._pids[rank])

    def wait_for_end(self, rank: int, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self.fds[rank], select.POLLIN)
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for fd in self.fds.values():
            # If other code has closed a descriptor, its number may be another file by now.
            if _is_pidfd(fd):
                os.close(fd)
        self.fds = {}

    def _exit_code(self, rank: int) -> int | None:
        request = bytearray(_PIDFD_INFO.size)
        for _ in range(_COLLECT_TRIES):
            if code := _code_of_zombie(self.fds[rank]):
                return code
            struct.pack_into("=Q", request, 0, _INFO_EXIT)
            try:
                fcntl.ioctl(self.fds[rank], _PIDFD_GET_INFO, request)
            except OSError:
                return None
            mask, *_, code = _PIDFD_INFO.unpack(request)
            if mask & _INFO_EXIT:
                return int(code)
            time.sleep(_COLLECT_PAUSE_S)
        return None


def process_state(pid: int) -> tuple[str, float]:
    """Return the letter of a process in /proc, X when it is gone, and the seconds of processor time it has used."""
    try:
        words = process_status(Path("/proc"), pid)
    except OSError:
        return "X", 0.0
    return words[0], (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _code_of_zombie(pid_fd: int) -> int:
    """Return the exit code of a process that has ended, and that its parent has not collected; 0 if it is not known."""
    try:
        lines = Path(f"/proc/self/fdinfo/{pid_fd}").read_text().splitlines()
        pid = next(int(line.partition(":")[2]) for line in lines if line.startswith("Pid:"))
        return int(process_status(Path("/proc"), pid)[_STATUS_CODE])
    except (OSError, ValueError, IndexError, StopIteration):
        return 0  # collected already, or in the process table of another container


def _is_pidfd(fd: int) -> bool:
    try:
        return "[pidfd" in os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - no file
    except OSError:
        return False


class EndWatch:
    """A thread that wakes this rank as soon as the process of another rank of its host ends.

    It only saves time: a waiting thread also looks by itself, ten times a second.

    ``on_end`` is called in the thread, after each end. The pidfds stay the caller's, open until ``close``.
    """

    def __init__(self, pid_fds: Iterable[int], on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._poll = select.poll()
        for fd in pid_fds:
            self._poll.register(fd, select.POLLIN)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="horovod-ends", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it."""
        with contextlib.suppress(OSError):  # other code in this process has closed it: then poll reports that
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            os.close(self._bell)

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._bell:
                    return
                self._poll.unregister(fd)
            with contextlib.suppress(ValueError):  # the control page is gone: this rank leaves
                self._on_end()
