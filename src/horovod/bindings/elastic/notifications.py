"""Horovod's notifications of changed hosts, for scripts and libraries that pass them on to a state."""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["HostUpdateResult", "WorkerNotificationManager", "notification_manager"]


class HostUpdateResult(enum.IntFlag):
    """How the set of hosts has changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class WorkerNotificationManager:
    """Tells listeners that hosts have changed. ``State.check_host_updates`` asks the job service itself.

    Attributes:
        listeners: the states of the functions of ``run`` that are running, and objects that scripts have registered.
    """

    def __init__(self) -> None:
        self.listeners: list[Any] = []

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no service to start. The arguments of Horovod's method are accepted."""

    def register_listener(self, listener: Any) -> None:
        """Add a listener: a ``State``, or another object with ``on_hosts_updated``."""
        self.listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        """Remove a listener."""
        self.listeners = [other for other in self.listeners if other is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell all listeners of a change; see ``State.on_hosts_updated``."""
        for listener in self.listeners:
            listener.on_hosts_updated(timestamp, update_res)


#: The manager of this process, under Horovod's name.
notification_manager = WorkerNotificationManager()
