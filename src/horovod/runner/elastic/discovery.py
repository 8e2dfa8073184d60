"""Old import path of classes that list the hosts of an elastic job, for ``settings.discovery`` of ``horovod.ray``."""

from __future__ import annotations

import abc
from collections.abc import Mapping

__all__ = ["FixedHosts", "HostDiscovery"]


class HostDiscovery(abc.ABC):
    """Base class of discoveries."""

    @abc.abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each host that may be used, by its name."""


class FixedHosts(HostDiscovery):
    """Lists given hosts; ``set`` replaces them, also while a job runs.

    Args:
        host_slots: number of slots by name of the host.
    """

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self.set(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Replace the hosts."""
        self._host_slots = dict(host_slots)
