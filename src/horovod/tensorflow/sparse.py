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
    slices: Sequence[tf.IndexedSlices], how: Reduction, name: str | None, ignore_name_scope: bool
) -> list[tf.IndexedSlices]:
    """Gather the rows of all ranks; an optimizer that takes IndexedSlices adds up rows with equal indices.

    Args:
        slices: IndexedSlices with any number of rows on each rank.
        how: Sum or Average, without factors.
        name: key of the match.
        ignore_name_scope: whether the key omits the name scopes of a graph.

    Raises:
        NotImplementedError: ``how`` has another operation, or a factor.
    """
    if how.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"IndexedSlices can be combined by Sum and Average only. Received: {how.op.name.capitalize()}; "
            "use tf.convert_to_tensor() first, or sparse_as_dense=True"
        )
    if how.prescale != 1.0 or how.postscale != 1.0:
        raise NotImplementedError(
            "IndexedSlices take no prescale_factor or postscale_factor; scale their values, or use sparse_as_dense=True"
        )
    flat = [part for one in slices for part in (one.values, one.indices)]
    gathered = collectives.allgather(flat, how.process_set, name, ignore_name_scope)
    members = collectives.members_of(how.process_set)
    found = []
    for one, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True):
        if how.op is ReduceOp.AVERAGE:
            values, indices = _averaged(values, indices, members)
        found.append(tf.IndexedSlices(values, indices, dense_shape=one.dense_shape))
    return found


def _averaged(values: Any, indices: Any, members: Any) -> tuple[Any, Any]:
    """Divide rows by the number of ranks; rows that are equal on all ranks must average to exactly themselves."""
    dtype = values.dtype
    if not dtype.is_floating or (isinstance(members, int) and members & (members - 1) == 0):
        return values / tf.cast(members, dtype), indices
    # Three rounded thirds do not sum to the whole. So divide the differences to one rank's row: 0 for equal rows.
    if dtype in (tf.float16, tf.bfloat16):
        values = tf.cast(values, tf.float32)
    rows, place = tf.unique(indices)
    count = tf.size(rows)
    base = tf.gather(values, tf.math.unsorted_segment_min(tf.range(tf.size(indices)), place, count))
    rest = tf.math.unsorted_segment_sum(values - tf.gather(base, place), place, count)
    present = tf.math.unsorted_segment_sum(tf.ones_like(place), place, count)
    present = tf.reshape(present, tf.concat([[count], tf.ones([tf.rank(values) - 1], tf.int32)], 0))
    share = tf.cast(present, values.dtype) / tf.cast(members, values.dtype)
    averaged = tf.where(present == members, base, base * share) + rest / tf.cast(members, values.dtype)
    return tf.cast(averaged, dtype), rows
