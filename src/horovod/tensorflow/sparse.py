"""IndexedSlices: rows of a tensor and their indices; ranks gather them instead of summing a dense tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.bindings.reductions import Reduction
from horovod.core.requests import ReduceOp
from horovod.tensorflow import collectives

__all__ = ["allreduce_slices", "densified"]


def densified(tensor: Any) -> Any:
    """Return IndexedSlices as a dense tensor; return other values unchanged."""
    return tf.convert_to_tensor(tensor) if isinstance(tensor, tf.IndexedSlices) else tensor


def allreduce_slices(
    slices: Sequence[tf.IndexedSlices], how: Reduction, name: str | None, ignore_name_scope: bool, parts: str = ""
) -> list[tf.IndexedSlices]:
    """Gather the rows of all ranks, as one process would have them for the whole batch; ``parts`` as in ``allreduce``.

    Raises:
        NotImplementedError: ``how`` has another operation, or a factor; or it averages integers.
    """
    if how.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"IndexedSlices can be combined by Sum and Average only. Received: {how.op.name.capitalize()}; "
            "use tf.convert_to_tensor() first, or sparse_as_dense=True"
        )
    if how.prescale != 1.0 or how.postscale != 1.0:
        raise NotImplementedError(
            "IndexedSlices take no prescale_factor, postscale_factor or gradient_predivide_factor; scale their values, "
            "or use sparse_as_dense=True"
        )
    if how.op is ReduceOp.AVERAGE and not all(one.dtype.is_floating or one.dtype.is_complex for one in slices):
        raise NotImplementedError(
            f"IndexedSlices of {', '.join({one.dtype.name for one in slices})} cannot be averaged; use hvd.Sum, or "
            "tf.convert_to_tensor() first"
        )
    flat = [part for one in slices for part in (one.values, one.indices)]
    gathered = collectives.allgather(flat, how.process_set, name, ignore_name_scope, parts)
    members = collectives.members_of(how.process_set)
    found = []
    for one, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True):
        if how.op is ReduceOp.AVERAGE:
            # Keep equal indices apart: an optimizer that does not add them up first treats them as in one process.
            values = _divided(values, indices, members)
        found.append(tf.IndexedSlices(values, indices, dense_shape=one.dense_shape))
    return found


def _divided(values: Any, indices: Any, members: Any) -> Any:
    """Divide rows by the number of ranks; those that are equal on all ranks must add up to exactly themselves."""
    rows = values / tf.cast(members, values.dtype)
    if isinstance(members, int) and members & (members - 1) == 0:
        return rows
    # Three rounded thirds do not add up to the whole. So the last one of such rows is the remainder.
    found, place, present = tf.unique_with_counts(indices)
    count = tf.size(found)
    last = tf.math.unsorted_segment_max(tf.range(tf.size(indices)), place, count)
    whole, third, where = tf.gather(values, last), tf.gather(rows, last), last[:, None]
    others = tf.tensor_scatter_nd_update(rows, where, tf.zeros_like(third))
    remainder = whole - tf.math.unsorted_segment_sum(others, place, count)
    differences = tf.math.unsorted_segment_sum(tf.abs(values - tf.gather(whole, place)), place, count)
    present = tf.reshape(present, tf.concat([[count], tf.ones([tf.rank(values) - 1], tf.int32)], 0))
    is_equal = (differences == 0) & (present == members)
    return tf.tensor_scatter_nd_update(rows, where, tf.where(is_equal, remainder, third))
