"""One worker of MultiWorkerMirroredStrategy that is measured: does what its rank writes to its input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["main"]


class _Worker:
    def __init__(self) -> None:
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        self._call: Callable[[], Any] = lambda: None
        self._task: Any = None

    def do(self, do: str, **what: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self, f"_{do}")(**what) or {}
        return answer

    def _reduced(self, tensors: Any, op: Any) -> Any:
        context = tf.distribute.get_replica_context()
        assert context is not None
        return context.all_reduce(op, tensors)

    def _prepare(self, count: int, dtype: str) -> dict[str, Any]:
        rank = self._strategy.cluster_resolver.task_id
        tensor = tf.constant(np.full(count, rank + 1), dtype)
        total = tf.distribute.ReduceOp.SUM

        def reduce(x: Any) -> Any:
            return self._strategy.run(lambda y: self._reduced(tf.identity(y), total), (x,))

        call = tf.function(reduce, autograph=False)
        self._call = lambda: call(tensor)
        return {"value": float(call(tensor)[-1])}

    def _measure(self, calls: int) -> dict[str, Any]:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            self._call()
            times.append(time.perf_counter() - start)
        return {"times": times}

    def _release(self) -> None:
        self._call = lambda: None

    def _model(self, name: str, rank: int, tiny: bool) -> None:
        from benchmarks.models_tensorflow import make_task
        from benchmarks.sgd_tensorflow import sgd_step

        self._task = make_task(name, rank, tiny=tiny)
        mean = tf.distribute.ReduceOp.MEAN

        def reduce(grads: Any) -> Any:
            return self._reduced([tf.convert_to_tensor(grad) for grad in grads], mean)

        step = sgd_step(self._task, reduce)
        self._call = tf.function(lambda: self._strategy.run(step), autograph=False)

    def _step(self) -> None:
        self._call()

    def _weights(self, path: str) -> None:
        np.save(path, np.concatenate([np.asarray(v).reshape(-1) for v in self._task.model.trainable_variables]))


def main() -> None:
    """Carry out one command for each line of the standard input."""
    worker = _Worker()
    for line in sys.stdin:
        print(json.dumps(worker.do(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
