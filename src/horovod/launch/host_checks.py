"""Checks all hosts of a job side by side before a rank starts, and reports all problems at once."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from horovod._version import __version__
from horovod.errors import LaunchError
from horovod.launch import frames
from horovod.launch.remote import Connection
from horovod.launch.ssh import Access
from horovod.rendezvous.interfaces import machine_name

__all__ = ["HostCheck", "check_hosts", "close_hosts", "find_twin"]

_MOST_QUOTED = 80
#: Seconds until the next try to reach a pod, and messages of ssh for a pod that is not ready yet.
_AGAIN_S = 1.0
_LATER = ("Could not resolve hostname", "Connection refused")
#: Seconds between two lines about hosts that have not answered yet.
_REMIND_S = 30.0


class HostCheck:
    """The check of one host by an agent that is started there. No method blocks for longer than ssh needs to end.

    Raises:
        LaunchError: ssh cannot be run.
    """

    def __init__(self, host: str, access: Access) -> None:
        self.host, self._access = host, access
        self._question = frames.Check(
            os.fsencode(Path.cwd()), os.fsencode(access.command), os.fsencode(access.path),
            os.fsencode(sys.executable), list(access.interfaces),
        )  # fmt: skip
        self._deadline = time.monotonic() + access.timeout_s
        self._again_at = math.inf
        self._is_late = False
        self.connection = Connection(host, access)  # connection to the agent; its owner closes it
        self.hello: frames.AgentHello | None = None  # first message of the agent; None until it has come
        self.problems: list[str] = []  # sentences; none when all is well
        self.is_done = False  # whether the host has answered, or never will

    @property
    def due_at(self) -> float:
        """When ``tend`` is due."""
        return self.connection.wire.alive_at if self.hello is not None else min(self._deadline, self._again_at)

    def tend(self) -> None:
        """Read messages of the agent, and send a heartbeat."""
        now = time.monotonic()
        if self._again_at <= now and not self.is_done:
            self._again_at = math.inf
            self.connection.close()
            self.connection = Connection(self.host, self._access)
        if not self.problems and self._again_at == math.inf:
            self.is_done |= self._hear()
        if not self.is_done and now >= self._deadline:  # after a look: this process may have been stopped
            self.problems, self.is_done = [self.connection.why()], True
        self.connection.wire.flush()
        if self.hello is not None:
            self.connection.wire.show_life()

    def try_later(self) -> bool:
        """Try again, if the host is a pod whose name or sshd may come seconds after the pod itself."""
        last = self.connection.stderr.strip().rpartition("\n")[2]
        is_pod = "KUBERNETES_SERVICE_HOST" in os.environ and any(word in last for word in _LATER)
        if not is_pod or self.hello is not None or time.monotonic() >= self._deadline:
            return False
        self.problems, self.is_done, self._again_at = [], False, time.monotonic() + _AGAIN_S
        if not self._is_late:
            self._is_late = True
            _say(f"{self.host} cannot be reached yet ({last.strip()}); trying again")
        return True

    def _hear(self) -> bool:
        """Read messages of the agent; return whether the check is over."""
        connection, host = self.connection, self.host
        try:
            for frame in connection.wire.receive():
                if isinstance(frame, frames.AgentHello):
                    self.hello = frame
                    if frame.version != __version__:
                        self.problems = [
                            f"{host}: it has khorovod {frame.version}, and this host {__version__}; install the same "
                            f"version on both"
                        ]
                        return True
                    connection.wire.send(self._question)
                elif isinstance(frame, frames.Checked):
                    self.problems = [f"{host}: {problem}" for problem in frame.problems]
                    return True
        except frames.FrameError as error:
            self.problems = [f"{host}: its agent speaks another protocol ({error}); install version {__version__}"]
            if last := connection.wire.noise.decode(errors="replace").strip().splitlines()[-1:]:
                self.problems = [
                    f"{host}: {error} came before Python began, such as {last[0][:_MOST_QUOTED]!r}; a start file of "
                    f"its login shell, such as ~/.bashrc, must print nothing where there is no terminal"
                ]
            return True
        if connection.wire.is_closed:
            self.problems = [connection.why() if self.hello is None else _ended(connection)]
        return connection.wire.is_closed


def check_hosts(hosts: Sequence[str], here: str, access: Access) -> dict[str, HostCheck]:
    """Start an agent on each host, let it check the host, and return those that are ready; the caller must close them.
    ``here`` is this host's name, empty if it is not part of the job.

    Raises:
        LaunchError: a host has problems; one sentence for each.

    Blocks until all have answered, ``access.timeout_s`` at most.
    """
    found: dict[str, HostCheck] = {}
    try:
        for host in hosts:
            found[host] = HostCheck(host, access)
        _await_answers(list(found.values()), access.timeout_s)
        _find_twins(found, here)
        if wrong := [sentence for check in found.values() for sentence in check.problems]:
            raise LaunchError("no rank was started:\n" + "\n".join(f"    {sentence}" for sentence in wrong))
    except BaseException:
        close_hosts(found)
        raise
    return found


def close_hosts(found: Mapping[str, HostCheck]) -> None:
    """End the agents of checked hosts. Blocks until they have ended."""
    for check in found.values():
        check.connection.hang_up()
    for check in found.values():
        check.connection.close()


def _await_answers(checks: Sequence[HostCheck], timeout_s: float) -> None:
    began_s = time.monotonic()
    remind_at = began_s + _REMIND_S
    while waiting := [check.host for check in checks if not check.is_done]:
        poll = select.poll()
        for check in checks:
            if not (check.problems or check.connection.wire.is_closed):  # else ``tend`` reads nothing more
                poll.register(check.connection.wire.incoming, select.POLLIN)
        wait_s = min(check.due_at for check in checks if not check.problems) - time.monotonic()
        poll.poll(max(0.0, min(wait_s, frames.ALIVE_S)) * 1000 + 1)
        for check in checks:
            check.tend()
            if check.is_done and check.problems:
                check.try_later()
        if (now := time.monotonic()) >= remind_at:
            remind_at = now + _REMIND_S
            _say(
                f"after {now - began_s:.0f} s, {', '.join(sorted(waiting))} did not answer yet; giving up after "
                f"{timeout_s:g} s (--start-timeout)"
            )


def _say(line: str) -> None:
    print(f"horovodrun: {line}", file=sys.stderr, flush=True)


def _ended(connection: Connection) -> str:
    """Return the problem of a host whose agent has ended."""
    last = "".join(f" ({line})" for line in connection.stderr.strip().splitlines()[-1:])
    return f"{connection.host}: the connection with its agent ended before all hosts were checked{last}; start it again"


def _find_twins(found: Mapping[str, HostCheck], here: str) -> None:
    machines = {machine_name(): here} if here else {}
    for check in found.values():  # in the user's order, not in that of the answers
        if twin := find_twin(check, machines):
            check.problems.append(twin)


def find_twin(check: HostCheck, machines: dict[str, str], offered: Container[str] | None = None) -> str:
    """Return the problem of a host that is a machine of the job already; else add it to ``machines``. ``offered`` are
    the names that the user gives now, if they may be others than those in ``machines``.
    """
    other = check.host if check.hello is None else machines.setdefault(check.hello.machine, check.host)
    if other == check.host:
        return ""
    problem = f"{check.host}: it is the same machine as {other}"
    if offered is not None and other not in offered:
        return f"{problem}, its name in this job; offer it as {other}"
    return f"{problem}; name each machine once, with all of its slots"
