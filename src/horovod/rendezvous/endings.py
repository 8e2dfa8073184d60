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
from collections.abc import Iterable, Sequence
from pathlib import Path

from horovod.rendezvous.siblings import Siblings
from horovod.world import ON_HOST, World, exits_path, own_slot, process_status

__all__ = ["Endings", "exits_name", "has_begun", "how_ended", "note_begin", "signal_name"]

# Process id, whether it has ended, exit code or minus the signal, as in launch.keeper; whether it has called init().
_ROW = struct.Struct("<iiii")
_BEGUN = struct.pack("<i", 1)
_earlier: dict[str, dict[int, tuple[int, str]]] = {}


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
