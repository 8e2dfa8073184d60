"""Horovod's API for PopART: ``import horovod.popart as hvd``.

It uses the methods of PopART's sessions, and imports neither PopART nor a framework: it works with the script's own
``popart``, the vendor's or the software one (khorovod-ipu).
"""

from horovod.bindings import common_names
from horovod.bindings.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.popart.optimizer import DistributedOptimizer
from horovod.popart.sessions import DistributedTrainingSession, broadcast_weights

__all__ = [
    "DistributedOptimizer",
    "DistributedTrainingSession",
    "allgather_object",
    "broadcast_object",
    "broadcast_weights",
]
__all__ += common_names.__all__
