"""Collectives that use the engine of ``horovod.tensorflow``."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from khorovod_ipu.tensorflow.collectives import WorkerCollectives

__all__ = ["EngineCollectives"]

#: For every graph, the counter of its collectives.
_counts: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class EngineCollectives(WorkerCollectives):
    """Horovod's collectives; ``hvd.init()`` must have been called."""

    host = "/device:CPU:0"

    def __init__(self) -> None:
        if not hvd.is_initialized():
            raise ValueError(
                "call hvd.init() before the strategy is made; from tensorflow.python.ipu import horovod as hvd"
            )
        self.rank = hvd.rank()
        self.size = hvd.size()

    def _name(self, kind: str) -> str | None:
        """Return a key with the number of the operation in its graph: names of layers may differ between ranks."""
        if tf.executing_eagerly():
            return None
        graph = tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
            graph = graph.outer_graph
        if graph not in _counts:
            _counts[graph] = itertools.count()
        return f"strategy.{kind}.{next(_counts[graph])}"

    def reduce(self, tensor: Any, mean: bool) -> Any:
        name = self._name("reduce")
        return hvd.allreduce(tensor, op=hvd.Average if mean else hvd.Sum, name=name, ignore_name_scope=True)

    def gather(self, tensor: Any) -> Any:
        return hvd.allgather(tensor, name=self._name("gather"), ignore_name_scope=True)

    def broadcast(self, tensor: Any) -> Any:
        return hvd.broadcast(tensor, 0, name=self._name("broadcast"), ignore_name_scope=True)
