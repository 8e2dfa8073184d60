"""Checks all hosts of a job side by side before a rank starts, and says everything that is wrong at once."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod._version import __version__
from horovod.errors import LaunchError
from horovod.launch import frames
from horovod.launch.remote import Connection
from horovod.launch.ssh import Access
from horovod.rendezvous.interfaces import machine_name

__all__ = ["CheckedHosts", "Newcomer", "check_hosts"]

_MOST_QUOTED = 80
#: When to try again to reach a pod, and how ssh says that it is too early.
_AGAIN_S = 1.0
_LATER = ("Could not resolve hostname", "Connection refused")
#: How often to say which hosts have not answered yet.
_REMIND_S = 30.0


class CheckedHosts:
    """The other hosts of a job, each with an agent that is ready.

    Args:
        connections: by name of the host.
    """

    def __init__(self, connections: dict[str, Connection]) -> None:
        self.connections = connections
        #: First message of each agent, by name of the host.
        self.hellos: dict[str, frames.AgentHello] = {}
        #: Pods that could not be reached at first.
        self.late: set[str] = set()
        #: Problems, by name of the host.
        self.problems: dict[str, list[str]] = {}

    def close(self) -> None:
        """End all agents. Blocks until they have ended."""
        for connection in self.connections.values():
            connection.hang_up()
        for connection in self.connections.values():
            connection.close()


def check_hosts(hosts: Sequence[str], here: str, access: Access, command: str, path: str) -> CheckedHosts:
    """Start an agent on each host and let it look around.

    Args:
        hosts: names of the other hosts.
        here: name under which this host takes part; empty when it does not.
        access: how they are reached.
        command: what the ranks run.
        path: where it is searched there.

    Returns:
        Agents that are ready; the caller closes them.

    Raises:
        LaunchError: with one sentence for each thing that is wrong on any of them.

    Blocks until all have answered, ``access.timeout_s`` at most.
    """
    found = CheckedHosts({})
    check = _question(access, command, path)
    try:
        for host in hosts:
            found.connections[host] = Connection(host, access)
        _listen(found, check, access)
        _find_twins(found, here)
        wrong = [sentence for host in hosts for sentence in found.problems.get(host, [])]
        if wrong:
            raise LaunchError("no rank was started:\n" + "\n".join(f"    {sentence}" for sentence in wrong))
    except BaseException:
        found.close()
        raise
    return found


class Newcomer:
    """A host that is checked while the job runs. No method blocks for longer than ssh needs to end.

    Args:
        host: as the user named it.
        access: how it is reached.
        command: what the ranks run.
        path: where it is searched there.
        machines: name in the job of each machine that is in use, by ``machine_name``.

    Attributes:
        problems: sentences; none when all is well.
        is_done: whether the host has answered, or never will.

    Raises:
        LaunchError: ssh cannot be run.
    """

    def __init__(self, host: str, access: Access, command: str, path: str, machines: Mapping[str, str]) -> None:
        self.host = host
        self.connection = Connection(host, access)
        self._found = CheckedHosts({host: self.connection})
        self._check = _question(access, command, path)
        self._machines = machines
        self._deadline = time.monotonic() + access.timeout_s
        self.problems: list[str] = []
        self.is_done = False

    @property
    def hello(self) -> frames.AgentHello:
        """How its agent has presented itself."""
        return self._found.hellos[self.host]

    @property
    def due_at(self) -> float:
        """When ``tend`` is due."""
        return self.connection.wire.alive_at if self.host in self._found.hellos else self._deadline

    def tend(self) -> None:
        """Hear what it says, and show life."""
        wire = self.connection.wire
        if _hear(self._found, self.host, self._check):
            self._finish(self._found.problems.get(self.host, []))
        elif time.monotonic() >= self._deadline:
            self._finish([self.connection.why()])
        wire.flush()
        if self.host in self._found.hellos:
            wire.show_life()

    def _finish(self, problems: list[str]) -> None:
        other = self._machines.get(self.hello.machine, "") if not problems else ""
        if other:
            problems = [f"{self.host}: it is the same machine as {other}; name each machine once, with all its slots"]
        self.problems, self.is_done = problems, True
        if problems:
            self.connection.kill()
            self.connection.close()


def _question(access: Access, command: str, path: str) -> frames.Check:
    return frames.Check(
        os.fsencode(Path.cwd()), os.fsencode(command), os.fsencode(path), os.fsencode(sys.executable),
        list(access.interfaces),
    )  # fmt: skip


def _listen(found: CheckedHosts, check: frames.Check, access: Access) -> None:
    timeout_s = access.timeout_s
    poll = select.poll()
    hosts = {connection.wire.incoming: host for host, connection in found.connections.items()}
    waiting = set(found.connections)
    for fd in hosts:
        poll.register(fd, select.POLLIN)
    began_s = asked_s = time.monotonic()
    deadline, remind_at = began_s + timeout_s, began_s + _REMIND_S
    again_at: dict[str, float] = {}
    while waiting and asked_s < deadline:
        # If this process was stopped, what has come meanwhile still counts.
        for fd, _ in poll.poll(min(deadline - asked_s, frames.ALIVE_S) * 1000 + 1):
            host, is_heard = hosts[fd], _hear(found, hosts[fd], check)
            if found.connections[host].wire.is_closed or host in found.problems:
                poll.unregister(fd)
            if is_heard and _comes_later(found, host):
                again_at[host] = time.monotonic() + _AGAIN_S
            elif is_heard:
                waiting.discard(host)
        for host in [host for host, at in again_at.items() if time.monotonic() >= at]:
            del again_at[host]
            found.connections[host].close()
            found.connections[host] = Connection(host, access)
            hosts[found.connections[host].wire.incoming] = host
            poll.register(found.connections[host].wire.incoming, select.POLLIN)
        for connection in found.connections.values():
            connection.wire.flush()
            if connection.host in found.hellos:
                connection.wire.show_life()
        asked_s = time.monotonic()
        if waiting and asked_s >= remind_at:
            remind_at = asked_s + _REMIND_S
            print(
                f"horovodrun: after {asked_s - began_s:.0f} s, {', '.join(sorted(waiting))} did not answer yet; "
                f"giving up after {timeout_s:g} s (--start-timeout)",
                file=sys.stderr,
            )
    for host in waiting:
        found.problems[host] = [found.connections[host].why()]


def _comes_later(found: CheckedHosts, host: str) -> bool:
    """Whether a host is a pod whose name or sshd may come seconds after the pod itself; it is no problem then."""
    last = found.connections[host].stderr.strip().rpartition("\n")[2]
    if host in found.hellos or "KUBERNETES_SERVICE_HOST" not in os.environ or not any(word in last for word in _LATER):
        return False
    del found.problems[host]
    if host not in found.late:
        found.late.add(host)
        print(f"horovodrun: {host} cannot be reached yet ({last.strip()}); trying again", file=sys.stderr, flush=True)
    return True


def _hear(found: CheckedHosts, host: str, check: frames.Check) -> bool:
    """Take what a host says; whether it has said all."""
    connection = found.connections[host]
    try:
        for frame in connection.wire.receive():
            if isinstance(frame, frames.AgentHello):
                found.hellos[host] = frame
                if frame.version != __version__:
                    found.problems[host] = [
                        f"{host}: it has khorovod {frame.version}, and this host {__version__}; install the same "
                        f"version on both"
                    ]
                    return True
                connection.wire.send(check)
            elif isinstance(frame, frames.Checked):
                if frame.problems:
                    found.problems[host] = [f"{host}: {problem}" for problem in frame.problems]
                return True
    except frames.FrameError as error:
        if last := connection.wire.noise.decode(errors="replace").strip().splitlines()[-1:]:
            found.problems[host] = [
                f"{host}: {error} came before Python began, such as {last[0][:_MOST_QUOTED]!r}; a start file of its "
                f"login shell, such as ~/.bashrc, must print nothing where there is no terminal"
            ]
            return True
        found.problems[host] = [f"{host}: its agent speaks another protocol ({error}); install version {__version__}"]
        return True
    if connection.wire.is_closed:
        found.problems[host] = [_ended(connection) if host in found.hellos else connection.why()]
    return connection.wire.is_closed


def _ended(connection: Connection) -> str:
    """Why there is an agent no more."""
    last = "".join(f" ({line})" for line in connection.stderr.strip().splitlines()[-1:])
    return f"{connection.host}: the connection with its agent ended before all hosts were checked{last}; start it again"


def _find_twins(found: CheckedHosts, here: str) -> None:
    names: dict[str, str] = {machine_name(): here} if here else {}
    # In the user's order, whoever has answered first.
    for host in found.connections:
        hello = found.hellos.get(host)
        other = names.setdefault(hello.machine, host) if hello is not None else host
        if other != host:
            found.problems.setdefault(host, []).append(
                f"{host}: it is the same machine as {other}; name each machine once, with all of its slots"
            )
