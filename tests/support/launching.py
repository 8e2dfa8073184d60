"""Start horovodrun as a user would, and see what became of its processes."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

__all__ = ["HOROVODRUN", "PATIENT", "Ended", "Running", "horovodrun", "started"]

HOROVODRUN = [sys.executable, "-m", "horovod.launch.cli"]
#: Gives the others as long as they need to end by themselves after a failure, and the keeper to end the job.
PATIENT = [
    sys.executable,
    "-c",
    "import sys; from horovod.launch import cli, supervision;"
    "supervision.FAILURE_GRACE_S = supervision.SAFETY_S = 300; sys.exit(cli.main())",
]
TIMEOUT_S = 300.0


class Ended:
    """Exit code and output of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[str]:
        """Standard output in lines."""
        return self.out.splitlines()


def horovodrun(
    *args: str, program: Sequence[str] = HOROVODRUN, cwd: Path | None = None, stdin: str = "", **environ: str
) -> Ended:
    """Run to the end. One thread per rank unless told otherwise, so that the note on threads stays away."""
    process = subprocess.run(
        [*program, *args],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=TIMEOUT_S,
        env={"OMP_NUM_THREADS": "1", **os.environ, **environ},
    )
    return Ended(process.returncode, process.stdout, process.stderr)


class Running:
    """A horovodrun under way whose ranks print ``up PID PID ...`` when they are ready.

    On other hosts these ids are of no use here: they belong to another namespace.
    """

    def __init__(self, process: subprocess.Popen[str], jobs: int, is_here: bool) -> None:
        assert process.stdout is not None
        self.process = process
        self.stdout: IO[str] = process.stdout
        self.pidfds: dict[int, int] = {}
        while jobs:
            line = self.stdout.readline()
            assert line, "horovodrun ended before its ranks were up"
            if "up " in line:
                jobs -= 1
                for pid in line.split("up ")[1].split() if is_here else ():
                    with contextlib.suppress(ProcessLookupError):  # ended already
                        self.pidfds[os.pidfd_open(int(pid))] = int(pid)

    def still_alive(self, timeout_s: float = 120.0) -> list[int]:
        """The processes that the ranks named and that do not end within ``timeout_s``."""
        poll = select.poll()
        waiting = dict(self.pidfds)
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            ended = poll.poll(timeout_s * 1000)
            if not ended:
                return sorted(waiting.values())
            for fd, _ in ended:
                poll.unregister(fd)
                del waiting[fd]
        return []

    def end(self) -> Ended:
        """Wait for the end."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return Ended(self.process.returncode, out, err)


@contextlib.contextmanager
def started(
    *args: str, ranks: int, program: Sequence[str] = HOROVODRUN, is_here: bool = True, **environ: str
) -> Iterator[Running]:
    """Start horovodrun, or another launcher, and wait until its ranks are up; at the end nothing of it lives on."""
    process = subprocess.Popen(
        [*program, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ, **environ},
    )
    running: Running | None = None
    try:
        running = Running(process, ranks, is_here)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        for fd in running.pidfds if running else ():
            os.close(fd)
