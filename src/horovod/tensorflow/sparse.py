"""IndexedSlices: rows of a tensor with their numbers, which are gathered where a dense tensor would be summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.core.requests import ReduceOp
from horovod.tensorflow import collectives
from horovod.tensorflow.collectives import Reduction

__all__ = ["allreduce_slices", "densified"]


def densified(tensor: Any) -> Any:
    """Return IndexedSlices as a dense tensor; anything else as it is."""
    return tf.convert_to_tensor(tensor) if isinstance(tensor, tf.IndexedSlices) else tensor


def allreduce_slices(
    slices: Sequence[tf.IndexedSlices], how: Reduction, name: str | None, ignore_name_scope: bool
) -> list[tf.IndexedSlices]:
    """Gather the rows of all ranks; their sum is what an optimizer that takes IndexedSlices makes of them.

    Args:
        slices: of any number of rows on each rank.
        how: Sum or Average, without factors.
        name: key of the match.
        ignore_name_scope: whether the key leaves out the scopes of a graph.

    Raises:
        NotImplementedError: ``how`` asks for something else.
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
    members = how.process_set.size() or 1
    found = []
    for one, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True):
        if how.op is ReduceOp.AVERAGE:
            values = values / tf.cast(members, values.dtype)
        found.append(tf.IndexedSlices(values, indices, dense_shape=one.dense_shape))
    return found
