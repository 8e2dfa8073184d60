"""Finds ranks that have ended already, even before a meeting, so that no rank waits for them until the timeout.

There are three sources. Under horovodrun, the parent of all ranks records how each has ended, in anonymous memory that
processes of the same user can read. Under other launchers, the process table shows the processes that they run. Ranks
of an earlier meeting are known by their processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from horovod.launchers import LAUNCHERS
from horovod.world import ON_HOST, World, exits_path, launcher_process, own_slot, process_status

__all__ = ["Endings", "Siblings", "exits_name", "has_begun", "how_ended", "note_begin", "signal_name"]

# Process id, whether it has ended, exit code or minus the signal, as in launch.keeper; whether it has called init().
_ROW = struct.Struct("<iiii")
_BEGUN = struct.pack("<i", 1)
_earlier: dict[str, dict[int, tuple[int, str]]] = {}
_LOOK_S = 0.4
#: Time, and number of further looks, without a sign of a rank: for one that was there, which may be in the middle of
#: execve(2), and for one that may not have been started yet. Looks count because time may pass while nothing runs.
_GONE, _NEVER = (1.0, 1), (1.6, 4)


def exits_name(job: str) -> str:
    """Return the name of the keeper's table for ``job``."""
    return f"horovod-exits-{hashlib.sha256(job.encode(errors='surrogatepass')).hexdigest()[:16]}"


def note_begin() -> None:
    """Write into the keeper's table, if there is one, that this rank has called ``init()``."""
    slot = own_slot()
    if exits_path() and slot.isdecimal():
        with contextlib.suppress(OSError):  # in another namespace
            table = os.open(exits_path(), os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(table, _BEGUN, (int(slot) + 1) * _ROW.size - len(_BEGUN))
            finally:
                os.close(table)


def has_begun(table: int, slot: int) -> bool:
    """Return whether the process in a slot of this host has called ``init()``, as the keeper's table says."""
    return os.pread(table, len(_BEGUN), (slot + 1) * _ROW.size - len(_BEGUN)) == _BEGUN


class Endings:
    """The processes of one job, seen from one of its ranks; ``proc`` is where the process table is mounted."""

    def __init__(self, world: World, proc: Path = Path("/proc")) -> None:
        self._world = world
        self._proc = proc
        self._table = -1
        self._siblings = Siblings(world, proc)
        path = exits_path()
        job = world.job.partition(ON_HOST)[0]  # each host's keeper counts only the ranks of its host
        if path and world.launcher == "horovodrun":
            try:
                if os.readlink(path).startswith(f"/memfd:{exits_name(job)} "):  # noqa: PTH115 - no file
                    self._table = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                pass  # another namespace, or a job of another kind: nothing is known

    def close(self) -> None:
        """Close the table."""
        if self._table >= 0:
            os.close(self._table)
            self._table = -1

    def met(self, pids: Sequence[int]) -> None:
        """Remember the processes of a meeting, by rank; not in elastic jobs, whose service knows how processes end."""
        if self._world.meeting.generation:
            return
        known = {}
        for rank, pid in enumerate(pids):
            try:
                known[rank] = (pid, process_status(self._proc, pid)[19])
            except (OSError, IndexError):
                known[rank] = (pid, "")
        _earlier[self._world.job] = known

    def ended(self, ranks: Iterable[int]) -> tuple[int, str] | None:
        """Return the first of ``ranks`` that will not come any more, and why; None if all may come."""
        for rank in ranks:
            text = self._exit_of(rank) or self._missing(rank) or self._siblings.fate(rank)
            if text:
                return rank, f"{text} before its init() was done"
        return None

    def _exit_of(self, rank: int) -> str:
        row = os.pread(self._table, _ROW.size, rank * _ROW.size) if self._table >= 0 else b""
        if len(row) < _ROW.size:
            return ""
        pid, has_ended, status, _ = _ROW.unpack(row)
        if not has_ended:
            return ""
        return f"rank {rank} (pid {pid}) on host {self._world.hostname} {how_ended(status)}"

    def _missing(self, rank: int) -> str:
        pid, started = _earlier.get(self._world.job, {}).get(rank, (0, ""))
        if not pid:
            return ""
        try:
            status = process_status(self._proc, pid)
            is_there = status[0] not in ("Z", "X") and status[19] == started
        except (OSError, IndexError):
            is_there = False
        who = f"rank {rank} (pid {pid}) on host {self._world.hostname}"
        return "" if is_there else f"{who}, which was in the job before, has ended"


def how_ended(status: int) -> str:
    """Return how a process ended: its exit code, or minus the signal that killed it."""
    return f"ended with exit code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Siblings:
    """The processes of this host that a launcher has started, from the process table, mounted at ``proc``.

    Launchers start all ranks of a host at once, in their order, below a process of their own, and each rank has its
    number in its environment. A rank has ended if its number was there and is missing now, or never was there although
    a higher one is; after a longer time, any other missing rank has ended, too.
    """

    def __init__(
        self,
        world: World,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launcher, self._proc, self._clock = world.launcher, proc, clock
        self._seen: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._since: dict[int, tuple[float, int]] = {}
        self._looks = 0
        self._looked_s = -_LOOK_S
        self._present: dict[int, int] = {}
        self._variable, self._daemon, self._is_common = "", 0, False
        job, is_part, _ = world.job.partition(ON_HOST)
        row = next((row for row in LAUNCHERS if row.name == world.launcher), LAUNCHERS[0])
        if row is LAUNCHERS[0] or "#" in job:
            return  # horovodrun's keeper knows the exits; and a part of a job has numbers of its own
        names = ["SLURM_LOCALID", *(pair[0] for pair in row.locals)] if is_part else [row.rank]
        # Read the environment at the start of this process: the process table does not show later changes.
        variable = next((name for name in names if self._number_of(os.getpid(), name) == world.rank), "")
        try:
            self._daemon, _ = launcher_process(row.rank, proc, os.getpid())
            self._variable = variable
            # A key derived from the launcher's process is common to all ranks below it; otherwise keys may differ.
            self._is_common = not world.meeting.has_key or not self._words_of(self._daemon).isdisjoint(row.starters)
        except (OSError, ValueError, IndexError):
            pass  # the process is another user's, or hidden by a container

    def fate(self, rank: int) -> str:
        """Return how a rank ended; empty as long as it may be there."""
        if not self._variable:
            return ""
        now = self._clock()
        if now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            self._looks += 1
            self._look()
        if rank in self._present:
            self._since.pop(rank, None)
            return ""
        since_s, looks = self._since.setdefault(rank, (now, self._looks))
        limit_s, most = _GONE if rank in self._seen or rank < max(self._seen, default=-1) else _NEVER
        if now - since_s < limit_s or self._looks - looks < most:
            return ""
        if rank in self._seen:
            return f"rank {rank} (pid {self._seen[rank]}) has ended"
        if not (self._is_common or len(self._seen) > 1):
            return ""
        return f"rank {rank} has ended, for {self._launcher} runs no process with {self._variable}={rank} on this host,"

    def _look(self) -> None:
        parents: dict[int, list[int]] = {}
        for entry in self._proc.iterdir():
            if entry.name.isdigit():
                try:
                    status = process_status(self._proc, int(entry.name))
                    if status[0] not in ("Z", "X"):
                        parents.setdefault(int(status[1]), []).append(int(entry.name))
                except (OSError, ValueError, IndexError):
                    continue  # ended meanwhile
        self._present, below = {}, parents.get(self._daemon, [])
        while below:
            for pid in below:
                number = self._numbers.get(pid, -1)
                number = self._number_of(pid, self._variable) if number < 0 else number
                if number >= 0:
                    self._numbers[pid] = number
                    self._present.setdefault(number, pid)
            below = [child for pid in below for child in parents.get(pid, [])]
        self._seen.update(self._present)

    def _words_of(self, pid: int) -> set[str]:
        """Return the words of a command line, without folders; Slurm separates them by blanks, the first by a colon."""
        line = (self._proc / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        return {word.rpartition("/")[2].rstrip(":") for word in line.replace("\0", " ").split()}

    def _number_of(self, pid: int, variable: str) -> int:
        needle = b"\0" + variable.encode() + b"="
        try:
            _, found, rest = (b"\0" + (self._proc / str(pid) / "environ").read_bytes()).partition(needle)
            return int(rest.partition(b"\0")[0]) if found else -1
        except (OSError, ValueError):
            return -1
