"""The hosts of an elastic job: connects to new ones while ranks train, and again to lost ones."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from horovod.errors import LaunchError
from horovod.launch.host_checks import HostCheck, find_twin
from horovod.launch.hosts import HostSlots
from horovod.launch.job import Job
from horovod.launch.plan import LaunchPlan
from horovod.launch.remote import AgentLink
from horovod.launch.ssh import Access
from horovod.rendezvous.interfaces import machine_name

__all__ = ["HostPool", "Pool", "ReadyHost"]


class ReadyHost(NamedTuple):
    """A host on which ranks can be started now."""

    name: str  # its name in the job
    link: AgentLink | Job | None  # connection to its agent, or the job that runs its ranks; None for this machine
    cores: int  # number of cores that ranks may use there
    number: int | None = None  # number of the only slot that is ready; None for the whole host
    plan: LaunchPlan | None = None  # its own plan; None for the job's plan


class Pool(Protocol):
    """The places of an elastic job."""

    problems: list[str]  # lines for the user about hosts that cannot be used
    plan: LaunchPlan  # the plan of the job; `ElasticJob` sets it

    @property
    def usable(self) -> dict[str, int]:
        """Number of slots of each host that is offered and ready."""

    def offer(self, hosts: Mapping[str, HostSlots]) -> None:
        """Take the hosts that may be used from now on."""

    def lose(self, name: str, number: int | None) -> None:
        """Drop a host, or one of its slots, that does not answer any more."""

    def tend(self, poll: select.poll) -> list[ReadyHost]:
        """Return the hosts, or slots, that have become ready; ``poll`` gets what makes another call due.

        Raises:
            LaunchError: none is left, and no other will come.
        """

    def due_at(self) -> list[float]:
        """When ``tend`` is due."""

    def close(self) -> None:
        """Disconnect from hosts that are not in use yet."""


class HostPool(Pool):
    """Tracks the offered hosts, and which of them can be used. An unusable one is tried again after ``cool_down_s``,
    which doubles up to a limit. ``found`` are other hosts that are offered from the beginning, and have been checked.
    """

    plan: LaunchPlan

    def __init__(
        self,
        own: str,
        cores: int,
        access: Access,
        cool_down_s: tuple[float, float],
        found: dict[str, HostCheck],
    ) -> None:
        self._own, self._cores, self._access, self._cool_down_s = own, cores, access, cool_down_s
        self._found = found
        self._offers: Mapping[str, HostSlots] = {}
        self._used: Mapping[str, HostSlots] = {}  # the last offers of which a host was ready
        self._newcomers: dict[str, HostCheck] = {}
        self._ready: dict[str, str] = {}  # machine by name of the host
        self._failures: dict[str, int] = {}
        self._told: set[str] = set()
        self._retry_at: dict[str, float] = {}
        #: Lines for the user about hosts that cannot be used.
        self.problems: list[str] = []

    def offer(self, hosts: Mapping[str, HostSlots]) -> None:
        self._offers = hosts

    @property
    def usable(self) -> dict[str, int]:
        return {name: offer.slots for name, offer in self._used.items() if name in self._ready}

    def lose(self, name: str, number: int | None = None) -> None:
        self._ready.pop(name, None)
        self._cool(name)

    def _cool(self, name: str) -> None:
        least, most = self._cool_down_s
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        self._retry_at[name] = time.monotonic() + min(most, least * 2.0 ** min(failures - 1, 64))

    def tend(self, poll: select.poll) -> list[ReadyHost]:
        now, ready = time.monotonic(), []
        while self._found:  # their new owner closes them
            address, check = self._found.popitem()
            ready.append(self._begin(address.rpartition("@")[2], check))
        for name, offer in self._offers.items():
            if name in self._ready or name in self._newcomers or self._retry_at.get(name, 0.0) > now:
                continue
            if name == self._own:
                self._ready[name] = machine_name()
                ready.append(ReadyHost(name, None, self._cores))
                continue
            try:
                newcomer = HostCheck(offer.name, self._access)
            except LaunchError as error:
                self._refuse(name, [f"{name}: {error}"])
                continue
            self._newcomers[name] = newcomer
            poll.register(newcomer.connection.wire.incoming, select.POLLIN)
        for name, newcomer in tuple(self._newcomers.items()):
            incoming = newcomer.connection.wire.incoming
            newcomer.tend()
            if newcomer.is_done:
                del self._newcomers[name]
                poll.unregister(incoming)
                machines = {machine: other for other, machine in self._ready.items()}
                machines.setdefault(machine_name(), self._own)
                if not newcomer.problems and (twin := find_twin(newcomer, machines, self._offers)):
                    newcomer.problems.append(twin)
                if newcomer.problems:
                    newcomer.connection.kill()
                    newcomer.connection.close()
                    self._refuse(name, newcomer.problems)
                else:
                    ready.append(self._begin(name, newcomer))
        if self._offers.keys() & self._ready:  # else all hosts were exchanged, and the former ones stay for now
            self._used = self._offers
        return ready

    def _begin(self, name: str, check: HostCheck) -> ReadyHost:
        assert check.hello is not None
        self._ready[name] = check.hello.machine
        return ReadyHost(name, check.connection, check.hello.cores)

    def _refuse(self, name: str, problems: Sequence[str]) -> None:
        new = [problem for problem in problems if problem not in self._told]
        self._told.update(new)
        self.problems += [f"{problem}; it is tried again later" for problem in new]
        self._cool(name)

    def due_at(self) -> list[float]:
        times = [at for name, at in self._retry_at.items() if self._is_wanted(name)]
        return times + [newcomer.due_at for newcomer in self._newcomers.values()]

    def _is_wanted(self, name: str) -> bool:
        return name in self._offers and name not in self._ready and name not in self._newcomers

    def close(self) -> None:
        for newcomer in self._newcomers.values():
            newcomer.connection.kill()
        for newcomer in self._newcomers.values():
            newcomer.connection.close()
        self._newcomers.clear()
