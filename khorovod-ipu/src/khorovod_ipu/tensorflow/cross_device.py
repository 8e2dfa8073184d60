"""TensorFlow's interface for reductions of a strategy, on top of any collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, cross_device_utils, distribute_utils, values

from khorovod_ipu.tensorflow.collectives import WorkerCollectives, gathered_rows

__all__ = ["HostReductions"]


class HostReductions(cross_device_ops.CrossDeviceOps):
    """Reductions over this worker's replicas and all other workers, each value separately, on the host.

    Every tensor is combined as soon as it exists, without packing, so that the first gradients are sent while the
    last are computed.
    """

    def __init__(self, collectives: WorkerCollectives) -> None:
        super().__init__()
        self._collectives = collectives

    @property
    def _num_between_graph_workers(self) -> int:
        # Also reduce the values of a single worker, so that results do not depend on the number of workers.
        return max(2, self._collectives.size)

    def combined(self, reduce_op: Any, value: Any) -> Any:
        """Return a tensor combined over all workers, on the device of ``value``.

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
        return _mirrored(self.combined(reduce_op, self._of_this_worker(reduce_op, per_replica_value)), destinations)

    def _of_this_worker(self, reduce_op: Any, per_replica_value: Any) -> Any:
        """Return the sum, or the mean, over the replicas of this worker."""
        parts = per_replica_value.values
        if len(parts) == 1:
            return parts[0]
        with tf.name_scope("replica_reduce"), tf.device(self._collectives.host):
            total = cross_device_utils.aggregate_tensors_or_indexed_slices(list(parts))
            if reduce_op != tf.distribute.ReduceOp.MEAN:
                return total
            if total.dtype.is_integer:
                return total // len(parts)
            return cross_device_utils.divide_by_n_tensors_or_indexed_slices(total, len(parts))

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        """Combine several values one by one, the last first, because the last layer's gradients are computed first."""
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
            parts = per_replica_value.values
            rows = parts[0] if len(parts) == 1 else tf.concat(parts, int(axis))
            return _mirrored(gathered_rows(rows, int(axis), self._collectives), destinations)

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        flat = tf.nest.flatten(value)
        reduced = [self.combined(reduce_op, one) for one in reversed(flat)]
        return tf.nest.pack_sequence_as(value, reduced[::-1])


def _mirrored(value: Any, destinations: Any) -> Any:
    devices = cross_device_ops.get_devices_from(destinations)
    if isinstance(value, tf.IndexedSlices):
        copies = [value] * len(devices)
    else:
        copies = []
        for device in devices:
            with tf.device(device):
                copies.append(tf.identity(value))
    return distribute_utils.regroup(tuple(copies), wrap_class=values.Mirrored)
