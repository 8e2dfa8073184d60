"""Old import path of names that elastic jobs need in any framework."""

from horovod.bindings.elastic import notifications
from horovod.bindings.elastic.notifications import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.elastic.run import run_fn
from horovod.bindings.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "run_fn"]
__all__ += notifications.__all__
