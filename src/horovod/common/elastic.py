"""Old import path of names that elastic jobs need in any framework."""

from horovod.bindings.elastic.notifications import (
    HostUpdateResult,
    WorkerNotificationManager,
    notification_manager,
)
from horovod.bindings.elastic.run import run_fn
from horovod.bindings.elastic.state import ObjectState, State

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "run_fn",
]
