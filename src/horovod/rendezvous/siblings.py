"""Detects ranks of this host whose process has ended, from the process table, so that no rank waits for them.

Launchers start all ranks of a host at once, in their order, below a process of their own, and each rank has its number
in its environment. A rank has ended if its number was there and is missing now, or never was there although a higher
one is; after a longer time, any other missing rank has ended, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from horovod.launchers import LAUNCHERS
from horovod.world import ON_HOST, World, launcher_process, process_status

__all__ = ["Siblings"]

_LOOK_S = 0.4
#: Time, and number of further looks, without a sign of a rank: for one that was there, which may be in the middle of
#: execve(2), and for one that may not have been started yet. Looks count because time may pass while nothing runs.
_GONE, _NEVER = (1.0, 1), (1.6, 4)


class Siblings:
    """See the module. ``proc`` is where the process table is mounted."""

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
