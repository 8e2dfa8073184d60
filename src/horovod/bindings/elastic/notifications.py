"""Horovod's notices of changed hosts, for scripts and libraries that pass them on to a state."""

from __future__ import annotations

import enum
from typing import Any, Protocol

__all__ = ["HostListener", "HostUpdateResult", "WorkerNotificationManager", "notification_manager"]


class HostUpdateResult(enum.IntFlag):
    """How the set of hosts has changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostListener(Protocol):
    """Takes notices."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take a notice.

        Args:
            timestamp: when, in seconds; later than that of the notice before.
            update_res: a ``HostUpdateResult``.
        """


class WorkerNotificationManager:
    """Tells listeners that hosts have changed. The job service itself is asked by ``State.check_host_updates``."""

    def __init__(self) -> None:
        self._listeners: list[HostListener] = []

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no service to start. The arguments of Horovod's method are accepted."""

    def register_listener(self, listener: HostListener) -> None:
        """Add a listener."""
        self._listeners.append(listener)

    def remove_listener(self, listener: HostListener) -> None:
        """Remove a listener."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell all listeners of a change; see ``HostListener.on_hosts_updated``."""
        for listener in self._listeners:
            listener.on_hosts_updated(timestamp, update_res)


#: Horovod's name for the one of this process.
notification_manager = WorkerNotificationManager()
