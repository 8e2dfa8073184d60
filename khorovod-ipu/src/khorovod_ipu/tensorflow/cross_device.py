"""TensorFlow's interface for reductions of a strategy, over any collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, distribute_utils, values

from khorovod_ipu.tensorflow.collectives import Collectives, gathered_rows

__all__ = ["HostReductions"]


class HostReductions(cross_device_ops.CrossDeviceOps):
    """Reductions of one value per worker, each for itself, on the host.

    Every tensor is combined as soon as it exists: nothing is packed together, so that the first gradients travel
    while the last are computed.

    Args:
        collectives: who combines them.
    """

    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives

    @property
    def _num_between_graph_workers(self) -> int:
        # Also of a worker alone: its values are reduced like others', so that results do not depend on it.
        return max(2, self._collectives.size)

    def combined(self, reduce_op: Any, value: Any) -> Any:
        """Return a tensor combined over all workers, where the value was.

        Args:
            reduce_op: ``tf.distribute.ReduceOp``.
            value: a tensor or IndexedSlices.
        """
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        with tf.name_scope("host_reduce"), tf.device(self._collectives.host):
            if isinstance(value, tf.IndexedSlices):
                return self._collectives.reduce(value, mean)
            return tf.identity(self._collectives.reduce(tf.identity(value), mean))

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """Combine one value."""
        return _mirrored(self.combined(reduce_op, per_replica_value.values[0]), destinations)

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        """Combine several values, one by one, the last first: gradients are computed from the last layer on."""
        results = [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in reversed(value_destination_pairs)
        ]
        return results[::-1]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Return worker 0's tensor."""
        with tf.name_scope("host_broadcast"), tf.device(self._collectives.host):
            return _mirrored(self._collectives.broadcast(tf.convert_to_tensor(tensor)), destinations)

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        with tf.name_scope("host_gather"), tf.device(self._collectives.host):
            return _mirrored(gathered_rows(per_replica_value.values[0], int(axis), self._collectives), destinations)

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        flat = tf.nest.flatten(value)
        reduced = [self.combined(reduce_op, one) for one in reversed(flat)]
        return tf.nest.pack_sequence_as(value, reduced[::-1])


def _mirrored(value: Any, destinations: Any) -> Any:
    (device, *_) = cross_device_ops.get_devices_from(destinations)
    if not isinstance(value, tf.IndexedSlices):
        with tf.device(device):
            value = tf.identity(value)
    return distribute_utils.regroup((value,), wrap_class=values.Mirrored)
