"""The ranks of another host, seen through ssh and the agent there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from horovod.errors import LaunchError
from horovod.launch import end_with_parent, frames
from horovod.launch.job import Job
from horovod.launch.local import LocalJob
from horovod.launch.plan import LaunchPlan
from horovod.launch.ssh import Access, command_line, diagnose
from horovod.syscalls import memory_file

__all__ = ["AgentLink", "Connection", "RemoteJob", "jobs_of", "travels"]

_GO_S, _LOOK_S = 2.0, 0.01
_TAKEN_BYTES = frames.WINDOW_BYTES // 8
# Variables of a host, a session or a terminal.
_STAYS = (
    "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "HOST", "TMPDIR", "TMP",
    "TEMP", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "TMUX", "STY", "KRB5CCNAME", "GPG_AGENT_INFO",
    "DBUS_SESSION_BUS_ADDRESS", "INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
    "SLURMD_NODENAME",
)  # fmt: skip
_STAYING_PREFIXES = ("XDG_", "SSH_", "BASH_FUNC_", "LISTEN_")


class AgentLink(Protocol):
    """A way to an agent, such as an ssh client or a task of Spark."""

    wire: frames.AgentWire  # frames from and to it

    @property
    def stderr(self) -> str:
        """Lines with the reason for its end."""

    def hang_up(self) -> None:
        """Have the agent end all ranks there, then itself."""

    def kill(self) -> None:
        """End the link at once; the agent notices that."""

    def close(self) -> None:
        """End the link, and wait for its end."""


class Connection:
    """An ssh client and the agent behind it, for their whole life."""

    def __init__(self, host: str, access: Access) -> None:
        self.host, self._access = host, access
        self._gone_by = 0.0
        if host not in access.starters and shutil.which("ssh") is None:
            raise LaunchError("there is no ssh in PATH; install OpenSSH's client on this host")
        self._stderr = memory_file("horovodrun-ssh")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid()), *command_line(host, access)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # the terminal's Ctrl-C is for horovodrun
                bufsize=0,
                # With it, srun writes labels between the frames.
                env={name: text for name, text in os.environ.items() if name != "SLURM_LABELIO"},
            )
        except OSError as error:
            os.close(self._stderr)
            raise LaunchError(f"cannot run {command_line(host, access)[0]} ({error.strerror})") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self.wire = frames.AgentWire(self._process.stdout.fileno(), self._process.stdin.fileno(), is_launcher=True)

    @property
    def stderr(self) -> str:
        """Standard error of ssh and the agent."""
        size = os.fstat(self._stderr).st_size
        return os.pread(self._stderr, 1 << 16, max(0, size - (1 << 16))).decode(errors="replace")

    def why(self) -> str:
        """Return why there is no agent."""
        noise = self.wire.noise.decode(errors="replace")
        status = self._wait() if self.wire.is_closed else None
        return diagnose(self.host, self._access, status, self.stderr, noise)

    def _wait(self) -> int:
        try:
            return self._process.wait(_GO_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def hang_up(self) -> None:
        """Have the agent end all ranks there, then itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self.wire.is_closed = True
        self._gone_by = self._gone_by or time.monotonic() + _GO_S

    def kill(self) -> None:
        """End ssh at once; the agent notices that."""
        self.hang_up()
        self._process.kill()

    def close(self) -> None:
        """End the agent and all below it. Blocks until ssh has ended, at most two seconds from ``hang_up``."""
        if self._stderr < 0:
            return
        self.hang_up()
        assert self._process.stdout is not None
        while time.monotonic() < self._gone_by and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.read(self.wire.incoming, 1 << 16)  # else ssh would wait for us
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        os.close(self._stderr)
        self._stderr = -1


class RemoteJob(Job):
    """The ranks of one plan on another host, whose agent has checked it; of ``horovod.run`` each makes the ``call``.
    ``host`` is its name in the job; that of the plan when empty.
    """

    def __init__(self, plan: LaunchPlan, connection: AgentLink, call: bytes = b"", host: str = "") -> None:
        super().__init__(host or plan.hostname)
        self._plan, self._connection, self._wire = plan, connection, connection.wire
        self._call = call
        self._owed = 0
        self._is_over = False
        self._parts: defaultdict[int, bytearray] = defaultdict(bytearray)  # pieces of results

    def fileno(self) -> int:
        return self._wire.incoming

    @property
    def outgoing(self) -> int:
        return self._wire.outgoing if self._wire.backlog else -1

    @property
    def due_at(self) -> float | None:
        return None if self._is_over else min(self._wire.alive_at, self._wire.silent_at(frames.SILENCE_S))

    def start(self, stdin: int | None) -> None:
        for i in range(0, len(self._call), frames.CHUNK_BYTES):
            self._wire.send(frames.CallPart(self._call[i : i + frames.CHUNK_BYTES]))
        common = {name: text for name, text in self._plan.environ.items() if travels(name)}
        self._wire.send(
            frames.StartJob(
                host=os.fsencode(self.host),
                command=[os.fsencode(word) for word in self._plan.command],
                environ=_bytes(common),
                returns=bool(self._call),
                silence_s=frames.SILENCE_S,
            )
        )

    def start_rank(self, rank: int, slot: int, environ: Mapping[str, str], output: Sequence[int] = ()) -> None:
        self._wire.send(frames.StartRank(rank, slot, _bytes(environ)))

    def kill_rank(self, rank: int) -> None:
        self._wire.send(frames.KillRank(rank))

    def kill_stopped(self, rank: int, pid: int) -> None:
        self._wire.send(frames.KillRank(rank, pid))

    def finish(self) -> None:
        self.tell(b"F")

    def tell(self, order: bytes) -> None:
        self._wire.send(frames.PassOrder(order))

    def flush(self) -> None:
        self._wire.flush()

    def tend(self) -> None:
        if not self._is_over:
            self._wire.show_life()

    def take(self) -> None:
        if self._owed >= _TAKEN_BYTES:
            self._wire.send(frames.Taken(self._owed))
            self._owed = 0

    def refuse(self, rank: int, stream: str) -> None:
        self._wire.send(frames.Unwanted(rank, stream))

    def news(self) -> Iterator[dict[str, Any]]:
        if self._is_over:
            return
        try:
            for frame in self._wire.receive():
                if isinstance(frame, frames.Output):
                    self._owed += len(frame.data)
                    yield {"output": (frame.rank, frame.stream), "data": frame.data}
                elif isinstance(frame, frames.Returned):
                    self._parts[frame.rank] += frame.data
                elif isinstance(frame, frames.News):
                    yield self._translated(frame.event)
        except frames.FrameError as error:
            yield from self._lost(f"the agent sent data that is not a frame: {error}")
        if self._wire.is_closed and not self._is_over:
            lines = self._connection.stderr.strip().splitlines()
            stood_s = self._wire.late_s
            if stood_s > frames.SILENCE_S / 2:  # the agent may have waited before, too
                lines = [f"horovodrun itself did not run for {stood_s:.0f} s, so that its agent took it for lost"]
            yield from self._lost("the connection ended" + (f" ({lines[-1]})" if lines else ""))

    def silence(self) -> Iterator[dict[str, Any]]:
        if self._wire.is_silent(frames.SILENCE_S):
            yield from self._lost(f"no sign of life for {frames.SILENCE_S:g} s")

    def _lost(self, reason: str) -> Iterator[dict[str, Any]]:
        if not self._is_over:
            self._is_over = True
            yield {"lost": reason}

    def _translated(self, event: dict[str, Any]) -> dict[str, Any]:
        if "done" in event:
            self._is_over = True
        if "lost" in event:
            self._is_over = True
            return {"lost": "the process that watches the ranks there was killed"}
        if "ended" in event:
            self.results[event["ended"]] = bytes(self._parts.pop(event["ended"], b""))
        return event

    def kill(self) -> None:
        """End the connection at once; the agent kills the ranks."""
        self._is_over = True
        self._connection.kill()

    def hang_up(self) -> None:
        self._connection.hang_up()

    def close(self) -> None:
        self._connection.close()


def travels(name: str) -> bool:
    """Whether a variable has the same meaning on another host."""
    return name not in _STAYS and not name.startswith(_STAYING_PREFIXES)


def _bytes(environ: Any) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(text) for name, text in environ.items()}


def jobs_of(plan: LaunchPlan, connections: Mapping[str, Connection], call: bytes = b"") -> list[Job]:
    """Return the ranks of each host of a plan: remote if a connection has the host's name, else local."""
    return [
        RemoteJob(part, connections[part.hostname], call) if part.hostname in connections else LocalJob(part, call)
        for _, part in plan.parts()
    ]
