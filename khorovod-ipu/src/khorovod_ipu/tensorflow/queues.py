"""What feeds a program of the device, and what it gives back while it runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["IPUInfeedQueue", "IPUOutfeedMode", "IPUOutfeedQueue"]

v1 = tf.compat.v1
_HOST = "/device:CPU:0"


class IPUInfeedQueue:
    """Feeds the elements of a dataset to a program.

    Args:
        dataset: what is fed.
        feed_name: accepted.
        device_ordinal: accepted.
        prefetch_depth: elements to prepare ahead.
        accepted: other arguments of the SDK, without effect here.
    """

    def __init__(
        self,
        dataset: Any,
        feed_name: str | None = None,
        device_ordinal: int | None = None,
        prefetch_depth: int | None = None,
        **accepted: Any,
    ) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(f"an infeed queue needs a tf.data.Dataset. Received: {type(dataset).__name__}")
        with tf.init_scope(), tf.device(_HOST):
            dataset = dataset.prefetch(prefetch_depth or 1)
            self._iterator = iter(dataset) if tf.executing_eagerly() else v1.data.make_initializable_iterator(dataset)

    @property
    def initializer(self) -> Any:
        """The operation to run before the first program; with eager execution nothing has to be."""
        return None if tf.executing_eagerly() else self._iterator.initializer

    @property
    def deleter(self) -> Any:
        """An operation that does nothing: the queue ends with its session."""
        return tf.no_op()

    def _dequeue(self) -> Any:
        with tf.device(_HOST):
            return self._iterator.get_next()


class IPUOutfeedMode:
    """What ``dequeue`` gives: all elements, or the last."""

    ALL = "all"
    LAST = "last"


class IPUOutfeedQueue:
    """Takes tensors from a running program.

    Args:
        feed_name: accepted.
        outfeed_mode: of ``IPUOutfeedMode``; None means all.
        device_ordinal: accepted.
        accepted: other arguments of the SDK, without effect here.
    """

    def __init__(
        self,
        feed_name: str | None = None,
        outfeed_mode: str | None = None,
        device_ordinal: int | None = None,
        **accepted: Any,
    ) -> None:
        self._mode = outfeed_mode or IPUOutfeedMode.ALL
        self._structure: Any = None
        self._queue: Any = None

    def enqueue(self, tensors: Any) -> Any:
        """Put a tensor, or a structure of them, into the queue; return the operation.

        Args:
            tensors: of the same shapes each time.

        Raises:
            ValueError: the queue is used a second time, or a shape is unknown.
        """
        if self._queue is not None:
            raise ValueError("an outfeed queue can be enqueued to in one place only")
        flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
        if not all(tensor.shape.is_fully_defined() for tensor in flat):
            raise ValueError(f"an outfeed needs shapes that are known. Received: {[t.shape for t in flat]}")
        self._structure = tensors
        with tf.init_scope(), tf.device(_HOST):
            self._queue = tf.queue.FIFOQueue(
                2**31 - 1, [tensor.dtype for tensor in flat], [tensor.shape for tensor in flat]
            )
        with tf.device(_HOST):
            return self._queue.enqueue(flat)

    def dequeue(self) -> Any:
        """Return what has been put in since the last time: stacked, or the last one."""
        if self._queue is None:
            raise ValueError("nothing was enqueued in this graph: call dequeue() after the program was built")
        with tf.device(_HOST):
            found = self._queue.dequeue_many(self._queue.size())
            flat = found if isinstance(found, (list, tuple)) else [found]
            if self._mode == IPUOutfeedMode.LAST:
                flat = [tensor[-1] for tensor in flat]
        return tf.nest.pack_sequence_as(self._structure, list(flat)) if _nested(self._structure) else flat[0]

    @property
    def deleter(self) -> Any:
        """An operation that does nothing: the queue ends with its session."""
        return tf.no_op()


def _nested(structure: Any) -> bool:
    return isinstance(structure, (list, tuple, dict))
