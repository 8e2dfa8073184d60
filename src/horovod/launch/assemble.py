"""From what the user named to hosts that are ready and a plan for them; for ``horovodrun`` and ``horovod.run``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from horovod import config
from horovod.launch.flags import UsageError
from horovod.launch.hosts import Host, Place, parse_hostfile, parse_hosts, place
from horovod.launch.job import Job
from horovod.launch.machine import is_this_host
from horovod.launch.muster import Muster, muster
from horovod.launch.plan import LaunchPlan, LaunchRequest, Share, make_plan
from horovod.launch.remote import jobs_of
from horovod.launch.ssh import Access

__all__ = ["Assembly", "assemble", "interface_settings", "named_hosts", "places"]


class Assembly:
    """A plan, and the hosts that wait for it.

    Args:
        plan: what to start.
        found: the other hosts.
    """

    def __init__(self, plan: LaunchPlan, found: Muster) -> None:
        self.plan = plan
        self._found = found

    def jobs(self, plan: LaunchPlan | None = None, call: bytes = b"") -> list[Job]:
        """What ``supervise`` takes.

        Args:
            plan: this instead of the plan made, such as one with open files.
            call: the call that each rank of another host makes, if it is one of ``horovod.run``.
        """
        connections = {_plain(host): connection for host, connection in self._found.connections.items()}
        return jobs_of(plan or self.plan, connections, call)

    def close(self) -> None:
        """Let the hosts go. Blocks until their agents have ended."""
        self._found.close()


def named_hosts(hosts: str, hostfile: str) -> list[Host]:
    """The hosts that the user named, if any.

    Args:
        hosts: value of ``-H``, or empty.
        hostfile: path of a host file, or empty.

    Raises:
        ValueError: the text is no list of hosts.
    """
    if hosts:
        return parse_hosts(hosts)
    if not hostfile:
        return []
    try:
        return parse_hostfile(Path(hostfile).read_text(encoding="utf-8"), hostfile)
    except OSError as error:
        raise UsageError(f"-hostfile {hostfile}: {error.strerror}") from error


def places(hosts: str, hostfile: str, num_proc: int) -> list[Place]:
    """Which hosts get how many ranks; this one all of them where the user named none.

    Args:
        hosts: value of ``-H``, or empty.
        hostfile: path of a host file, or empty.
        num_proc: number of ranks.

    Raises:
        ValueError: they do not fit, or the text is no list of hosts.
    """
    if num_proc < 1:
        raise UsageError(f"-np must be at least 1; received {num_proc}")
    named = named_hosts(hosts, hostfile)
    return place(named, num_proc, is_this_host) if named else [Place("localhost", num_proc, True)]


def interface_settings(interfaces: Sequence[str], tcp: bool = False) -> dict[str, str]:
    """Variables that tell the libraries below which network to take.

    Args:
        interfaces: their names, the best one first; empty leaves it to the libraries.
        tcp: whether InfiniBand is not to be used.
    """
    names = {"HOROVOD_GLOO_IFACE": interfaces[0], "NCCL_SOCKET_IFNAME": ",".join(interfaces)} if interfaces else {}
    return names | ({"NCCL_IB_DISABLE": "1"} if tcp else {})


def assemble(request: LaunchRequest, where: Sequence[Place], access: Access) -> Assembly:
    """Check all hosts, then decide what to start.

    Args:
        request: what the user asked for.
        where: which hosts get how many ranks.
        access: how other hosts are reached; its time is that of the settings.

    Returns:
        The plan, and the hosts that wait for it; the caller closes it.

    Raises:
        LaunchError: with a sentence for each thing that is wrong on any host.
        ValueError: a setting has a wrong value.

    Blocks until all hosts have answered, for ``--start-timeout`` at most.
    """
    # A wrong value is one error here rather than one on every rank.
    settings = config.load({**request.file, **request.environ, **request.flags})
    others = [place.name for place in where if not place.is_here]
    if not others:
        return Assembly(make_plan(request), Muster({}))
    here = next((place.name for place in where if place.is_here), "")
    access = replace(access, timeout_s=settings.start_timeout_s)
    found = muster(others, here, access, request.command[0], request.environ.get("PATH", ""))
    shares = tuple(
        Share(request.hostname, place.count, request.cores)
        if place.is_here
        else Share(_plain(place.name), place.count, found.hellos[place.name].cores)
        for place in where
    )
    return Assembly(make_plan(replace(request, shares=shares)), found)


def _plain(host: str) -> str:
    """The host's name, without the user's."""
    return host.rpartition("@")[2]
