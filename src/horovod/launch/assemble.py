"""Turn the hosts that the user named into checked hosts and a plan; for ``horovodrun`` and ``horovod.run``."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod import config
from horovod.config import Config
from horovod.errors import InitError, LaunchError
from horovod.launch.allocation import Allocation, allocated_slots, find_allocation, spread
from horovod.launch.flags import UsageError
from horovod.launch.host_checks import HostCheck, check_hosts, close_hosts
from horovod.launch.hosts import HostSlots, Place, is_this_host, parse_hostfile, parse_hosts, place
from horovod.launch.job import Job
from horovod.launch.plan import LaunchPlan, LaunchRequest, Share, make_plan
from horovod.launch.remote import jobs_of
from horovod.launch.signals import held_back
from horovod.launch.ssh import Access

if TYPE_CHECKING:
    from horovod.rendezvous.service import Service

__all__ = [
    "Assembly", "Chosen", "access_for", "assemble", "choose_hosts", "environment", "interface_names",
    "interface_settings", "named_hosts", "settings_of",
]  # fmt: skip


class Assembly:
    """A plan, and the checked other hosts that wait for it; with several hosts also the service where ranks meet."""

    def __init__(self, plan: LaunchPlan, found: Mapping[str, HostCheck], service: Service | None = None) -> None:
        self.plan = plan
        self._found = found
        self._service = service

    @property
    def reaches_others(self) -> bool:
        """Whether ranks run on other hosts."""
        return bool(self._found)

    def jobs(self, plan: LaunchPlan | None = None, call: bytes = b"") -> list[Job]:
        """Return the ranks of each host, for ``FixedJob``; ``plan`` replaces the own one, as one with open files."""
        connections = {_plain(host): check.connection for host, check in self._found.items()}
        return jobs_of(plan or self.plan, connections, call)

    def ended(self, rank: int, who: str, how: str) -> None:
        """Tell the ranks that wait for an ended rank who it was and how it ended, in words."""
        if self._service is not None:
            self._service.ended(rank, who, how)

    def close(self) -> None:
        """Disconnect from the hosts. Blocks until their agents have ended."""
        close_hosts(self._found)
        if self._service is not None:
            self._service.close()


def named_hosts(hosts: str, hostfile: str) -> list[HostSlots]:
    """Return the hosts that the user named, if any.

    Raises:
        ValueError: the text is not a list of hosts.
    """
    if hosts:
        return parse_hosts(hosts)
    if not hostfile:
        return []
    try:
        text = Path(hostfile).read_text(encoding="utf-8", errors="surrogateescape")
        return parse_hostfile(text, hostfile)
    except OSError as error:
        raise UsageError(f"-hostfile {hostfile}: {error.strerror}") from error


@dataclass(frozen=True)
class Chosen:
    """The hosts of a job."""

    num_proc: int  # number of ranks
    # hosts that the user or the scheduler named, with their slots; empty for this host alone
    named: Sequence[HostSlots]
    places: Sequence[Place]  # number of ranks on each host
    starters: Mapping[str, tuple[str, ...]]  # as `Access.starters`
    note: str = ""  # a line for the user about the scheduler's hosts or `--check`; else empty


def choose_hosts(
    hosts: str, hostfile: str, num_proc: int | None, has_script: bool = False, one_each: bool = False
) -> Chosen:
    """Choose the number of ranks on each host: the user's hosts, else the scheduler's, else this host. ``num_proc``
    None stands for the scheduler's number. With ``has_script`` a script names the hosts, later; with ``one_each`` each
    host gets one rank, and ``num_proc`` is ignored.

    Raises:
        ValueError: the ranks do not fit on the hosts, or the text is not a list of hosts.
    """
    try:
        allocation = find_allocation(os.environ)
    except ValueError:
        if not (hosts or hostfile or has_script):
            raise
        allocation = None
    if one_each:
        offered = named_hosts(hosts, hostfile) or (list(allocation.hosts) if allocation else [])
        where = place([HostSlots(host.name, 1) for host in offered], len(offered), is_this_host) if offered else []
        where = [replace(place, count=1) for place in where] or [Place("localhost", 1, True)]
        said = f"testing {len(where)} host{'s' * (len(where) != 1)}"
        return Chosen(len(where), offered, where, _starters(allocation), said)
    if num_proc is None and (allocation is None or hosts or hostfile or has_script):
        raise UsageError("-np is missing: say before the command how many to start: horovodrun -np 2 python train.py")
    chooses = num_proc is None
    if num_proc is None:
        num_proc = allocated_slots(os.environ)
    if not hasattr(num_proc, "__index__") or num_proc < 1:
        raise UsageError(f"-np (num_proc) must be at least 1; received {num_proc!r}")
    starters = _starters(allocation)
    if has_script:
        return Chosen(num_proc, (), (), starters)
    named, note = named_hosts(hosts, hostfile), ""
    if not named and allocation is not None:
        is_here = all(is_this_host(host.name) for host in allocation.hosts)
        named = [] if is_here else spread(allocation, num_proc)
        note = f"hosts from {allocation}" if named or chooses else ""
    where = place(named, num_proc, is_this_host) if named else [Place("localhost", num_proc, True)]
    return Chosen(num_proc, named, where, starters, note)


def _starters(allocation: Allocation | None) -> dict[str, tuple[str, ...]]:
    """Return the scheduler's commands that start agents, if their programs exist on this host."""
    there = {} if allocation is None else allocation.starters
    return {name: words for name, words in there.items() if shutil.which(words[0])}


def interface_names(given: Any, argument: str) -> tuple[str, ...]:
    """Return the network interfaces of an argument: names, or one text with commas; None for none.

    Raises:
        ValueError: no names.
    """
    names = given.split(",") if isinstance(given, str) else given or ()
    found = tuple(names) if isinstance(names, Iterable) else (None,)
    if all(isinstance(name, str) and name for name in found):
        return found
    raise ValueError(f"{argument} must be names of network interfaces, such as ['eth0']; received {given!r}")


def environment(given: Any, argument: str) -> dict[str, str]:
    """Return the environment variables of an argument; None for none.

    Raises:
        ValueError: names or values that no process can have.
    """
    found = {} if given is None else given
    if not (isinstance(found, Mapping) and all(isinstance(word, str) for pair in found.items() for word in pair)):
        raise ValueError(f"{argument} must map names of variables to texts; received {given!r}")
    wrong = [name for name, text in found.items() if not name or "=" in name or "\0" in name + text]
    if wrong:
        raise ValueError(f"{argument} has a variable that no process can have: {wrong[0]!r}={found[wrong[0]]!r}")
    return dict(found)


def interface_settings(interfaces: Sequence[str], tcp: bool = False) -> dict[str, str]:
    """Return the variables that tell Gloo and NCCL which network to use; ``tcp`` keeps NCCL from using InfiniBand. The
    best interface comes first; without one the libraries choose.
    """
    names = ",".join(interfaces)
    variables = {"HOROVOD_GLOO_IFACE": names, "NCCL_SOCKET_IFNAME": names} if names else {}
    return variables | ({"NCCL_IB_DISABLE": "1"} if tcp else {})


def settings_of(request: LaunchRequest) -> Config:
    """Return the settings of a job; checked here, a wrong value gives one error instead of one on every rank."""
    return config.load({**request.file, **request.environ, **request.flags})


def access_for(request: LaunchRequest, access: Access, settings: Config) -> Access:
    """Return how to reach other hosts for a job: with its time limit, and with what must exist there."""
    path = request.environ.get("PATH", "")
    return replace(access, timeout_s=settings.start_timeout_s, command=request.command[0], path=path)


def assemble(request: LaunchRequest, where: Sequence[Place], access: Access) -> Assembly:
    """Check all hosts, then make the plan; the caller must close it. The request gives timeout, command and path of
    ``access``.

    Raises:
        LaunchError: a host has problems; one sentence for each.
        ValueError: a setting has a wrong value.

    Blocks until all hosts have answered, for ``--start-timeout`` at most.
    """
    settings = settings_of(request)
    others = [place.name for place in where if not place.is_here]
    if not others:
        return Assembly(make_plan(request), {})
    here = next((place.name for place in where if place.is_here), "")
    access = access_for(request, access, settings)
    if len(where) > 1:
        # Import this before agents wait for heartbeats: it may take seconds on a network file system.
        with held_back():
            importlib.import_module("horovod.rendezvous.service")
    found = check_hosts(others, here, access)
    cores = {name: check.hello.cores for name, check in found.items() if check.hello is not None}
    shares = tuple(
        Share(request.hostname, place.count, request.cores)
        if place.is_here
        else Share(_plain(place.name), place.count, cores[place.name])
        for place in where
    )
    if len(shares) == 1:
        return Assembly(make_plan(replace(request, shares=shares)), found)
    service = None
    try:
        service = _service(request, shares, access.interfaces)
        return Assembly(make_plan(replace(request, shares=shares, meeting=tuple(service.endpoints))), found, service)
    except BaseException:
        close_hosts(found)
        if service is not None:
            service.close()
        raise


def _service(request: LaunchRequest, shares: Sequence[Share], interfaces: Sequence[str]) -> Service:
    # One host needs no ZeroMQ.
    from horovod.rendezvous.interfaces import own_addresses
    from horovod.rendezvous.service import Service

    hosts = [share.hostname for share in shares for _ in range(share.count)]
    try:
        return Service(bytes.fromhex(request.key), own_addresses(interfaces), hosts=hosts)
    except (OSError, InitError) as error:
        raise LaunchError(f"cannot open the rendezvous for ranks of other hosts on this host: {error}") from error


def _plain(host: str) -> str:
    """Return the host's name without the user's name."""
    return host.rpartition("@")[2]
