"""Interface of the collectives of a strategy, and their version for a single worker."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

__all__ = ["Alone", "WorkerCollectives", "gathered_rows"]


class WorkerCollectives(Protocol):
    """Combines tensors over all workers, in eager execution, in ``tf.function`` and in graphs of TensorFlow 1.

    Attributes:
        rank: rank of this worker.
        size: number of workers.
        host: TensorFlow's name of this worker's processor.
    """

    rank: int
    size: int
    host: str

    def reduce(self, tensor: Any, mean: bool) -> Any:
        """Return the sum, or the mean, over all workers; for IndexedSlices the rows of all workers.

        Args:
            tensor: same shape and dtype on all workers.
            mean: whether to divide by the number of workers.
        """
        ...

    def gather(self, tensor: Any) -> Any:
        """Concatenate all workers' tensors along the first dimension, which may differ."""
        ...

    def broadcast(self, tensor: Any) -> Any:
        """Return worker 0's tensor."""
        ...


class Alone(WorkerCollectives):
    """Collectives of a single worker."""

    rank = 0
    size = 1
    host = "/device:CPU:0"

    def reduce(self, tensor: Any, mean: bool) -> Any:
        return tensor

    def gather(self, tensor: Any) -> Any:
        return tensor

    broadcast = gather


def gathered_rows(tensor: Any, axis: int, collectives: WorkerCollectives) -> Any:
    """Concatenate all workers' tensors along any dimension.

    Args:
        tensor: tensor whose shape may differ between workers only in that dimension.
        axis: the dimension; negative numbers count from the end.
        collectives: collectives of the workers.
    """
    rank = tensor.shape.rank
    if rank is None:
        raise ValueError("gather needs a tensor whose number of dimensions is known")
    if not rank:
        raise ValueError("gather needs a tensor of at least one dimension; use tf.expand_dims for a number")
    if not -rank <= axis < rank:
        raise ValueError(f"gather along axis {axis} of a tensor of {rank} dimensions")
    order = [axis % rank, *(dim for dim in range(rank) if dim != axis % rank)]
    if axis % rank == 0:
        return collectives.gather(tensor)
    back = [order.index(dim) for dim in range(rank)]
    return tf.transpose(collectives.gather(tf.transpose(tensor, order)), back)
