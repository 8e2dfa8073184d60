"""Starts the keeper of a job on this host and talks with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from horovod.config import JOB_ID
from horovod.errors import LaunchError
from horovod.launch import keeper
from horovod.launch.job import Job
from horovod.launch.plan import LaunchPlan
from horovod.rendezvous.endings import exits_name
from horovod.world import EXITS_VARIABLE

__all__ = ["GRACE_S", "SAFETY_S", "LocalJob"]

GRACE_S = 5.0
"""From SIGTERM to SIGKILL."""
SAFETY_S = GRACE_S + 0.8
"""How long the keeper may take to end the job before it is not trusted any more."""
_GUARD_S = 3.0
# A process that forks right now shows up a moment later; on a busy machine, killed ones take a while to go.
_FEWEST_LOOKS, _MOST_LOOKS, _LOOK_S = 3, 100, 0.02


class LocalJob(Job):
    """The ranks of one plan on this host, seen through their keeper.

    Args:
        plan: what to start.
        first: rank of its first rank in the job.
    """

    has_pipes = True

    def __init__(self, plan: LaunchPlan, first: int = 0) -> None:
        super().__init__(first, plan.hostname, plan.size)
        self._plan = plan
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        # The guard, to be exact, whose child the keeper is.
        self._keeper: subprocess.Popen[bytes] | None = None

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._control.fileno()

    def start(self, outputs: Sequence[tuple[int, int]], stdin: int | None) -> None:
        """Start the keeper, which starts the ranks.

        Args:
            outputs: per rank, the files that become its standard output and error.
            stdin: standard input of rank 0, as ``subprocess`` takes it.

        Raises:
            LaunchError: the keeper could not be started.
        """
        orders = json.dumps(self._orders(outputs)).encode()
        try:
            plan_fd = os.memfd_create("horovodrun-plan")
            try:
                with open(os.dup(plan_fd), "wb") as file:
                    file.write(orders)
                os.lseek(plan_fd, 0, os.SEEK_SET)
                own = [fd for fds in self._plan.fds for fd in fds]
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", "-S", keeper.__file__, str(self._theirs.fileno()), str(plan_fd)],
                    stdin=stdin,
                    pass_fds=[self._theirs.fileno(), plan_fd, *(fd for pair in outputs for fd in pair), *own],
                    start_new_session=True,
                )
            finally:
                os.close(plan_fd)
        except OSError as error:
            raise LaunchError(f"cannot start the process that watches the ranks: {error}") from error
        finally:
            self._theirs.close()

    def _orders(self, outputs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        fds = self._plan.fds or ((),) * self._plan.size
        ranks = [
            {"env": dict(env), "stdin": self.first + rank == 0, "stdout": out, "stderr": err, "fds": list(fds[rank])}
            for rank, (env, (out, err)) in enumerate(zip(self._plan.ranks, outputs, strict=True))
        ]
        return {
            "command": self._plan.command,
            "env": dict(self._plan.environ),
            "ranks": ranks,
            "grace_s": GRACE_S,
            "exits": [exits_name(self._plan.environ[JOB_ID]), EXITS_VARIABLE],
        }

    def tell(self, order: bytes) -> None:
        """Send an order, see ``keeper``. Never blocks; safe in a signal handler."""
        with contextlib.suppress(OSError):
            self._control.send(order)

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield the keeper's events since the last call; ``{"lost": reason}`` when it is gone. Never blocks."""
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
            yield self.of_job(json.loads(message))

    def kill(self) -> None:
        """Have the guard kill the keeper and all below it; then kill what else has the name of the job."""
        if self._keeper is not None:
            self._keeper.terminate()
            try:
                self._keeper.wait(_GUARD_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
        for turn in range(_MOST_LOOKS):
            members = _members(self._plan.environ[JOB_ID])
            if not members and turn >= _FEWEST_LOOKS:
                return
            for pid in members:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Let go of the keeper; if ranks still run, this kills them. Blocks until the keeper has ended."""
        self._control.close()
        self._theirs.close()
        if self._keeper is not None:
            try:
                self._keeper.wait(SAFETY_S)
            except subprocess.TimeoutExpired:
                self.kill()


def _members(job: str) -> list[int]:
    """Processes that inherited the name of the job, wherever in the process tree they are now."""
    mark = f"\0{JOB_ID}={job}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if mark in b"\0" + (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
