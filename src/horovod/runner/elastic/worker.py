"""Old import path of notifications about changed hosts."""

from horovod.bindings.elastic.notifications import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
