"""The launcher's agent on another host: ``ssh host python -m horovod.launch.agent``.

Starts the host's ranks through a keeper, as the launcher itself does on its own host, and passes on output, news and
orders. It decides one thing: when its standard input ends, or the launcher is silent for too long, it kills every
process of the job on this host. Plan, environment and secret come on standard input, so no command line shows them.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from horovod._version import __version__
from horovod.cgroups import usable_cores
from horovod.errors import LaunchError
from horovod.launch import frames
from horovod.launch.frames import AgentWire
from horovod.launch.keeper import OWN_SIGNALS
from horovod.launch.local import LocalJob
from horovod.launch.plan import LaunchPlan
from horovod.rendezvous.interfaces import machine_name

__all__ = ["Agent", "main", "problems"]

_STREAMS = ("stdout", "stderr")


class Agent:
    """One host's part of a job. Its ranks get ``environ`` in addition to the variables of this process."""

    def __init__(self, wire: AgentWire, environ: Mapping[str, str] | None = None) -> None:
        self._wire, self._environ = wire, dict(environ or {})
        self._job: LocalJob | None = None
        self._poll = select.poll()
        self._poll.register(wire.incoming, select.POLLIN)
        self._pipes: dict[int, tuple[int, str]] = {}
        self._under_way = 0  # bytes of output that the launcher has not taken yet
        self._call = bytearray()
        self._silence_s = frames.SILENCE_BEFORE_START_S
        self._is_paused = False  # the launcher has been stopped, and says nothing
        self._own_path = ""  # folder of this Python, if it is not the launcher's
        self.has_lost_ranks = False  # the process that watches them was killed

    def run(self) -> None:
        """Serve until the launcher is gone. Blocks for as long as the job runs."""
        self._wire.send(frames.AgentHello(__version__, usable_cores(), machine_name()))
        while not self._wire.is_closed:
            self._step()
            self._wire.show_life()
            if self.is_deserted:
                return

    @property
    def is_deserted(self) -> bool:
        """Whether the launcher has given no sign of life for too long."""
        return self._wire.is_silent(self._limit_s)

    @property
    def _limit_s(self) -> float:
        return math.inf if self._is_paused else self._silence_s

    def _step(self) -> None:
        pipes = list(self._pipes) if self._under_way < frames.WINDOW_BYTES and not self._wire.backlog else []
        sending = [self._wire.outgoing] if self._wire.backlog else []
        sending += [self._job.outgoing] if self._job is not None and self._job.outgoing >= 0 else []
        for fd in pipes:
            self._poll.register(fd, select.POLLIN)
        for fd in sending:
            self._poll.register(fd, select.POLLOUT)
        due_at = min(self._wire.alive_at, self._wire.silent_at(self._limit_s))
        events = self._poll.poll(max(0.0, due_at - time.monotonic()) * 1000 + 1)
        for fd in (*pipes, *sending):
            self._poll.unregister(fd)
        self._wire.flush()
        if self._job is not None:
            self._job.flush()
        for fd, _ in events:
            if fd == self._wire.incoming:
                for frame in self._wire.receive():
                    self._obey(frame)
            elif fd in self._pipes:
                self._pass_on(fd)
            elif self._job is not None and fd == self._job.fileno():
                self._tell_news()

    def _obey(self, frame: object) -> None:
        if isinstance(frame, frames.Check):
            self._wire.send(frames.Checked(self._check(frame)))
        elif isinstance(frame, frames.CallPart):
            self._call += frame.data
        elif isinstance(frame, frames.StartJob):
            self._start(frame)
        elif isinstance(frame, frames.StartRank):
            self._start_rank(frame)
        elif isinstance(frame, frames.KillRank) and self._job is not None:
            if frame.stopped_pid:
                self._job.kill_stopped(frame.rank, frame.stopped_pid)
            else:
                self._job.kill_rank(frame.rank)
        elif isinstance(frame, frames.Taken):
            self._under_way -= frame.nbytes
        elif isinstance(frame, frames.PassOrder):
            self._is_paused = frame.order == b"S"
            if self._job is not None:
                self._job.tell(frame.order)
        elif isinstance(frame, frames.Unwanted):
            for fd in [fd for fd, what in self._pipes.items() if what == (frame.rank, frame.stream)]:
                self._drop(fd)

    def _check(self, check: frames.Check) -> list[str]:
        folder, command, path = (os.fsdecode(text) for text in (check.folder, check.command, check.path))
        if os.fsdecode(check.python) != sys.executable:
            self._own_path = str(Path(sys.executable).parent)
            path = self._own_path + os.pathsep + path
        found = problems(folder, command, path, check.interfaces)
        if not found:
            os.chdir(folder)
        return found

    def _start(self, start: frames.StartJob) -> None:
        self._silence_s = start.silence_s
        environ = {**os.environ, **self._environ, **_texts(start.environ), "PWD": str(Path.cwd())}
        if self._own_path:
            environ["PATH"] = self._own_path + os.pathsep + environ.get("PATH", os.defpath)
        plan = LaunchPlan(
            command=tuple(os.fsdecode(word) for word in start.command),
            hostname=os.fsdecode(start.host),
            environ=environ,
            ranks=(),
        )
        self._job = LocalJob(plan, bytes(self._call) if start.returns else b"")
        self._job.start(subprocess.DEVNULL)
        self._poll.register(self._job, select.POLLIN)

    def _start_rank(self, start: frames.StartRank) -> None:
        assert self._job is not None
        theirs = []
        for stream in _STREAMS:
            end, their_end = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(end, False)
            self._pipes[end] = (start.rank, stream)
            theirs.append(their_end)
        self._job.start_rank(start.rank, start.slot, _texts(start.environ), theirs)

    def _pass_on(self, fd: int) -> bool:
        """Send the output of a rank; return whether there may be more."""
        rank, stream = self._pipes[fd]
        try:
            data = os.read(fd, frames.CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._under_way += len(data)
        self._wire.send(frames.Output(rank, stream, data))
        if not data:
            self._drop(fd)
        return bool(data)

    def _drop(self, fd: int) -> None:
        del self._pipes[fd]
        os.close(fd)

    def _tell_news(self) -> None:
        assert self._job is not None
        for event in self._job.news():
            if "done" in event or "lost" in event:
                self._poll.unregister(self._job)
                self.has_lost_ranks = "lost" in event
                self._finish(self.has_lost_ranks)
                self._wire.send(frames.News(event))
                return
            for fd in [fd for fd, (rank, _) in self._pipes.items() if rank == event.get("ended")]:
                while self._pass_on(fd):  # send its last output before the news of its end
                    pass
            result = self._job.results.pop(event.get("ended", -1), b"")
            for i in range(0, len(result), frames.CHUNK_BYTES):
                self._wire.send(frames.Returned(event["ended"], result[i : i + frames.CHUNK_BYTES]))
            self._wire.send(frames.News(event))

    def _finish(self, is_lost: bool) -> None:
        """Send the remaining output after all ranks have ended."""
        assert self._job is not None
        if is_lost:
            self._job.kill()
        for fd in list(self._pipes):
            while self._pass_on(fd):
                pass

    def close(self) -> None:
        """Kill all ranks. Blocks until every process of the job on this host has ended."""
        if self._job is not None:
            self._job.close()
        for fd in list(self._pipes):
            self._drop(fd)


def problems(folder: str, command: str, path: str, interfaces: list[str]) -> list[str]:
    """Return what keeps a command from running here, as sentences without the host's name; ``path`` is a PATH."""
    found = []
    if not Path(folder).is_dir():
        found.append(f"there is no folder {folder}; create it there, or start from a folder that all hosts have")
    elif os.sep in command:
        program = Path(folder, command)
        if not program.is_file():
            found.append(f"there is no {program}; copy it there, or start from a folder that all hosts share")
        elif not os.access(program, os.X_OK):
            found.append(f"{program} is not executable there; `chmod +x {program}`, there")
    elif shutil.which(command, path=path) is None:
        found.append(f"the command {command!r} was not found there (PATH={path})")
    present = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in interfaces if name not in present]:
        found.append(f"there is no network interface {', '.join(missing)}; it has {', '.join(present)}")
    return found


def _texts(environ: dict[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(text) for name, text in environ.items()}


def main() -> int:
    """Entry point of the agent."""
    # Slurm signals all processes of a step: the ranks get the signal as well.
    for number in (*OWN_SIGNALS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # Other input and output of this process and its children must not mix with the frames.
    wire = AgentWire(os.dup(0), os.dup(1), is_launcher=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    agent = Agent(wire)
    try:
        agent.run()
    except (frames.FrameError, LaunchError) as error:
        print(f"horovod.launch.agent: {error}", file=sys.stderr)
        return 1
    finally:
        agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
