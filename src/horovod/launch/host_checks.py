"""Checks all hosts of a job side by side before a rank starts, and reports all problems at once."""

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
#: Seconds until the next try to reach a pod, and messages of ssh for a pod that is not ready yet.
_AGAIN_S = 1.0
_LATER = ("Could not resolve hostname", "Connection refused")
#: Seconds between two lines about hosts that have not answered yet.
_REMIND_S = 30.0


class CheckedHosts:
    """The other hosts of a job, each with an agent that is ready.

    Args:
        connections: connections by host name.
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
    """Start an agent on each host and let it check the host.

    Args:
        hosts: names of the other hosts.
        here: name of this host in the job; empty when it is no part of the job.
        access: how to reach the other hosts.
        command: program that the ranks run.
        path: value of PATH, for the search of the program there.

    Returns:
        Agents that are ready; the caller must close them.

    Raises:
        LaunchError: a host has problems; one sentence for each.

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
        access: how to reach it.
        command: program that the ranks run.
        path: value of PATH, for the search of the program there.
        machines: names in the job of the machines in use, by ``machine_name``.

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
        """First message of its agent."""
        return self._found.hellos[self.host]

    @property
    def due_at(self) -> float:
        """When ``tend`` is due."""
        return self.connection.wire.alive_at if self.host in self._found.hellos else self._deadline

    def tend(self) -> None:
        """Read its messages, and send a heartbeat."""
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
        # If this process was stopped, answers that came meanwhile still count.
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
    """Whether a host is a pod whose name or sshd may come seconds after the pod itself; then drop its problem."""
    last = found.connections[host].stderr.strip().rpartition("\n")[2]
    if host in found.hellos or "KUBERNETES_SERVICE_HOST" not in os.environ or not any(word in last for word in _LATER):
        return False
    del found.problems[host]
    if host not in found.late:
        found.late.add(host)
        print(f"horovodrun: {host} cannot be reached yet ({last.strip()}); trying again", file=sys.stderr, flush=True)
    return True


def _hear(found: CheckedHosts, host: str, check: frames.Check) -> bool:
    """Read a host's messages; return whether its check is over."""
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
    """Return the problem of a host whose agent has ended."""
    last = "".join(f" ({line})" for line in connection.stderr.strip().splitlines()[-1:])
    return f"{connection.host}: the connection with its agent ended before all hosts were checked{last}; start it again"


def _find_twins(found: CheckedHosts, here: str) -> None:
    names: dict[str, str] = {machine_name(): here} if here else {}
    # Use the user's order, not the order of the answers.
    for host in found.connections:
        hello = found.hellos.get(host)
        other = names.setdefault(hello.machine, host) if hello is not None else host
        if other != host:
            found.problems.setdefault(host, []).append(
                f"{host}: it is the same machine as {other}; name each machine once, with all of its slots"
            )
