"""Queues into and out of a running device program."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow.replicas import own_context
from khorovod_ipu.tensorflow.settings import check_accepted
from popdist import getNumLocalReplicas

__all__ = ["IPUInfeedQueue", "IPUIterator", "IPUOutfeedMode", "IPUOutfeedQueue"]

v1 = tf.compat.v1
_HOST = "/device:CPU:0"


class _Order:
    """Keeps operations of one program, built by several replicas of a process, in the order of the replicas."""

    def __init__(self) -> None:
        self._last: tuple[Any, list[Any]] | None = None

    @contextlib.contextmanager
    def next_one(self) -> Iterator[Callable[[list[Any]], None]]:
        """Return a context whose operations run after the previous context's; pass them to the yielded function."""
        graph = None if tf.executing_eagerly() else v1.get_default_graph()
        program = (graph, None if graph is None else graph._get_control_flow_context())
        before = self._last[1] if own_context() is not None and self._last and self._last[0] == program else []

        def done(operations: list[Any]) -> None:
            self._last = (program, operations)

        with tf.control_dependencies(before):
            yield done


def IPUIterator(dataset: Any = None, **accepted: Any) -> Any:
    """Return an iterator of a dataset that can be an argument of device functions.

    Args:
        dataset: source of the elements.
        accepted: other arguments of the SDK, without effect here.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"IPUIterator needs a tf.data.Dataset. Received: {type(dataset).__name__}")
    return iter(dataset)


class IPUInfeedQueue:
    """Feeds the elements of a dataset to a program.

    Args:
        dataset: source of the elements.
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
        inert, replicas = "buffer_depth data_to_prefetch optimise_latency", (None, 1, getNumLocalReplicas())
        check_accepted("an infeed", accepted, inert, replication_factor=replicas)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(f"an infeed queue needs a tf.data.Dataset. Received: {type(dataset).__name__}")
        with tf.init_scope(), tf.device(_HOST):
            dataset = dataset.prefetch(prefetch_depth or 1)
            self._order = _Order()
            self._iterator = iter(dataset) if tf.executing_eagerly() else v1.data.make_initializable_iterator(dataset)

    @property
    def initializer(self) -> Any:
        """The operation to run before the first program; without effect in eager execution."""
        return None if tf.executing_eagerly() else self._iterator.initializer

    @property
    def deleter(self) -> Any:
        """An operation without effect: the queue ends with its session."""
        return tf.no_op()

    def _dequeue(self) -> Any:
        with tf.device(_HOST), self._order.next_one() as done:
            element = self._iterator.get_next()
            done(tf.nest.flatten(element))
            return element


#: The elements that ``dequeue`` returns: all, or the last.
IPUOutfeedMode = enum.Enum("IPUOutfeedMode", {"ALL": "all", "LAST": "get_last"})


class IPUOutfeedQueue:
    """Takes tensors from a running program.

    Args:
        feed_name: accepted.
        outfeed_mode: a value of ``IPUOutfeedMode``; None means all.
        device_ordinal: accepted.
        accepted: other arguments of the SDK, without effect here.
    """

    def __init__(
        self,
        feed_name: str | None = None,
        outfeed_mode: IPUOutfeedMode | None = None,
        device_ordinal: int | None = None,
        **accepted: Any,
    ) -> None:
        known = {"io_batch_size": (1,), "replication_factor": (None, 1, getNumLocalReplicas())}
        check_accepted("an outfeed", accepted, "buffer_depth optimise_latency", **known)
        self._mode = IPUOutfeedMode(outfeed_mode or IPUOutfeedMode.ALL)
        self._structure: Any = None
        self._queue: Any = None
        self._places: dict[int, Any] = {}  # the graph of each replica's call; tf.function may trace it again
        self._order = _Order()

    def enqueue(self, tensors: Any) -> Any:
        """Put a tensor, or a structure of them, into the queue; return the operation.

        Args:
            tensors: tensors with the same shapes in each call.

        Raises:
            ValueError: the queue is used a second time in a graph, or a shape is unknown.
        """
        replica = own_context()
        place = replica.local if replica is not None else 0
        if not tf.executing_eagerly() and self._places.get(place) is v1.get_default_graph():
            raise ValueError("this outfeed queue is used twice. Make one IPUOutfeedQueue for each call of enqueue()")
        self._places[place] = v1.get_default_graph()
        flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
        if not all(tensor.shape.is_fully_defined() for tensor in flat):
            raise ValueError(f"an outfeed needs shapes that are known. Received: {[t.shape for t in flat]}")
        if self._queue is None:
            self._structure = tensors
            with tf.init_scope(), tf.device(_HOST):
                self._queue = tf.queue.FIFOQueue(
                    2**31 - 1, [tensor.dtype for tensor in flat], [tensor.shape for tensor in flat]
                )
        with tf.device(_HOST), self._order.next_one() as done:
            enqueued = self._queue.enqueue(flat)
            done([enqueued])
            return enqueued

    def dequeue(self, wait_for_completion: bool = False) -> Any:
        """Return the elements since the last call: stacked, or only the last one.

        With several replicas, the replica is the second dimension of stacked elements, or the first of a single one.

        Args:
            wait_for_completion: accepted; a program that has run is complete.
        """
        if self._queue is None:
            raise ValueError("nothing is enqueued in this graph. Call dequeue() after the program is built")
        replicas = len(self._places)
        with tf.device(_HOST):
            flat = tf.nest.flatten(self._queue.dequeue_many(self._queue.size() // replicas * replicas))
            if replicas > 1:
                flat = [tf.reshape(tensor, [-1, replicas, *tensor.shape[1:]]) for tensor in flat]
            if self._mode == IPUOutfeedMode.LAST:
                flat = [tensor[-1] for tensor in flat]
        return tf.nest.pack_sequence_as(self._structure, flat)

    def __iter__(self) -> Iterator[Any]:
        """Return the elements since the last call, one by one."""
        found = self.dequeue()
        if self._mode == IPUOutfeedMode.LAST:
            return iter([found])
        rows = range(int(tf.nest.flatten(found)[0].shape[0]))
        return iter([tf.nest.map_structure(lambda tensor, row=row: tensor[row], found) for row in rows])

    deleter = IPUInfeedQueue.deleter
