"""Names that every framework's ``hvd.elastic`` has; re-exported as those of ``horovod.bindings.common_names``."""

from horovod.bindings.elastic.leave import on_leave
from horovod.bindings.elastic.rates import LearningRateScale, passes_for
from horovod.bindings.elastic.state import ObjectState, State

__all__ = ["LearningRateScale", "ObjectState", "State", "on_leave", "passes_for"]
