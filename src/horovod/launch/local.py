"""Starts the keeper of a job on this host and talks with it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod import config
from horovod.config import JOB_ID
from horovod.errors import LaunchError
from horovod.files import read_all
from horovod.launch import keeper
from horovod.launch.job import Job
from horovod.launch.plan import FDS_VARIABLE, SCOPE_VARIABLE, LaunchPlan
from horovod.rendezvous.endings import exits_name, has_begun
from horovod.syscalls import memory_file
from horovod.world import EXITS_VARIABLE, is_stopped

__all__ = ["GRACE_S", "SAFETY_S", "LocalJob", "more_grace_s"]

GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL, in seconds."""
SAFETY_S = GRACE_S + 0.8
"""Time for the keeper to end the job; after it, the launcher kills the keeper."""
_GUARD_S = 3.0
# A process that is being forked shows up a moment later; on a busy machine, killed processes need a while to end.
_FEWEST_LOOKS, _MOST_LOOKS, _LOOK_S = 3, 100, 0.02


class LocalJob(Job):
    """The ranks of one plan on this host, seen through their keeper; of ``horovod.run`` each makes the ``call``."""

    has_pipes = True

    def __init__(self, plan: LaunchPlan, call: bytes = b"") -> None:
        super().__init__(plan.hostname)
        self._plan = plan
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._outgoing = os.dup(self._control.fileno())  # a copy, since it is polled separately
        self._orders: deque[tuple[bytes, list[int]]] = deque()  # each with descriptors; we close them
        self._call = _file_of(call) if call else -1
        self._results: dict[int, int] = {}  # the file of each rank's result
        self._stopped: list[int] = []  # stopped ranks that were killed, and not reported yet
        self._slots: dict[int, int] = {}
        self._exits = -1  # the keeper's table
        # The process is the guard, whose child is the keeper.
        self._keeper: subprocess.Popen[bytes] | None = None

    def fileno(self) -> int:
        return self._control.fileno()

    @property
    def outgoing(self) -> int:
        return self._outgoing if self._orders else -1

    def start(self, stdin: int | None) -> None:
        try:
            self._exits = memory_file(exits_name(self._plan.environ[JOB_ID]))
            plan = {
                "command": self._plan.command,
                "env": dict(self._plan.environ),
                "grace_s": GRACE_S + more_grace_s(self._plan.environ),
                "exits": [self._exits, EXITS_VARIABLE],
            }
            plan_fd = _file_of(json.dumps(plan).encode())
            try:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", "-S", keeper.__file__, str(self._theirs.fileno()), str(plan_fd)],
                    stdin=stdin,
                    pass_fds=[self._theirs.fileno(), plan_fd, self._exits],
                    start_new_session=True,
                )
            finally:
                os.close(plan_fd)
        except OSError as error:
            raise LaunchError(f"cannot start the process that watches the ranks: {error}") from error
        finally:
            self._theirs.close()

    def start_rank(self, rank: int, slot: int, environ: Mapping[str, str], output: Sequence[int] = ()) -> None:
        fds, own = [*output], dict(environ)
        self._slots[rank] = slot
        if self._call >= 0:
            self._results[rank] = memory_file("horovod-run")
            fds += [os.dup(self._call), os.dup(self._results[rank])]
            own[FDS_VARIABLE] = "3,4"  # the keeper gives inherited descriptors these numbers
        self._order({"start": rank, "slot": slot, "env": own, "stdin": rank == 0}, fds)

    def kill_rank(self, rank: int) -> None:
        self._order({"kill": rank})

    def kill_stopped(self, rank: int, pid: int) -> None:
        if is_stopped(pid):
            self._stopped.append(rank)
            self.kill_rank(rank)

    def finish(self) -> None:
        self._orders.append((b"F", []))
        self.flush()

    def _order(self, order: dict[str, Any], fds: Sequence[int] = ()) -> None:
        self._orders.append((json.dumps(order).encode(), [*fds]))
        self.flush()

    def flush(self) -> None:
        while self._orders:
            message, fds = self._orders[0]
            try:
                socket.send_fds(self._control, [message], fds)
            except OSError as error:
                # RLIMIT_NOFILE limits how many descriptors an ordinary user may have in flight.
                if isinstance(error, BlockingIOError) or error.errno == errno.ETOOMANYREFS:
                    return
            self._orders.popleft()
            for fd in fds:
                os.close(fd)

    def tell(self, order: bytes) -> None:
        with contextlib.suppress(OSError):
            self._control.send(order)

    def news(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                message = self._control.recv(1 << 17)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                yield {"lost": "the process that watches the ranks was killed"}
                return
            while self._stopped:  # before the news of their ends
                yield {"stopped": self._stopped.pop(0)}
            event = json.loads(message)
            if (result := self._results.pop(event.get("ended"), -1)) >= 0:
                self.results[event["ended"]] = read_all(result)
                os.close(result)
            yield event | ({"has_begun": self.has_begun(event["ended"])} if "ended" in event else {})

    def has_begun(self, rank: int) -> bool:
        return has_begun(self._exits, self._slots[rank])

    def kill(self) -> None:
        if self._keeper is not None:
            self._keeper.send_signal(keeper.KILL_KEEPER)
            try:
                self._keeper.wait(_GUARD_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
        for turn in range(_MOST_LOOKS):
            members = _members(self._plan.environ)
            if not members and turn >= _FEWEST_LOOKS:
                return
            for pid in members:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)

    def close(self) -> None:
        self._control.close()
        self._theirs.close()
        left = [self._outgoing, self._call, self._exits, *self._results.values()]
        left += [fd for _, fds in self._orders for fd in fds]
        for fd in left:
            if fd >= 0:
                os.close(fd)
        self._outgoing = self._call = self._exits = -1
        self._results.clear()
        self._orders.clear()
        if self._keeper is not None:
            try:
                self._keeper.wait(SAFETY_S)
            except subprocess.TimeoutExpired:
                self.kill()


def more_grace_s(environ: Mapping[str, str]) -> float:
    """Return the time that ranks get after SIGTERM beyond ``GRACE_S``, to complete their step and write their state."""
    settings = config.load(environ)
    return settings.elastic_timeout_s if settings.elastic and settings.checkpoint_dir else 0.0


def _file_of(data: bytes) -> int:
    """Return a file in memory, open at its beginning."""
    fd = memory_file("horovodrun")
    with open(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _members(environ: Mapping[str, str]) -> list[int]:
    """Return the processes that inherited the name of the job or scope, anywhere in the process tree."""
    name = SCOPE_VARIABLE if SCOPE_VARIABLE in environ else JOB_ID
    mark = f"\0{name}={environ[name]}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if mark in b"\0" + (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
