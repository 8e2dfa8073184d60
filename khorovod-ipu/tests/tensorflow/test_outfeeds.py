"""Outfeed queues in loops of TensorFlow 2, which ``tf.function`` may trace more than once."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from harness import run_ranks


def _loop(replicas: int) -> list[Any]:
    import tensorflow as tf

    import popdist
    from khorovod_ipu.tensorflow.queues import IPUOutfeedQueue
    from khorovod_ipu.tensorflow.strategies import IPUStrategy, PopDistStrategy

    values = {"POPDIST_NUM_TOTAL_REPLICAS": str(replicas), "POPDIST_NUM_LOCAL_REPLICAS": str(replicas)}
    with mock.patch.dict(os.environ, values):  # other tests use this process, too
        strategy = PopDistStrategy() if replicas > 1 else IPUStrategy()
        with strategy.scope():
            w, outfeed = tf.Variable(1.0), IPUOutfeedQueue(replication_factor=replicas)

            @tf.function
            def steps(count: int) -> None:
                for _ in tf.range(count):
                    outfeed.enqueue({"w": w.read_value()})
                    context = tf.distribute.get_replica_context()
                    total = context.all_reduce("SUM", w.read_value())
                    w.assign(total / replicas + 1.0)

            @tf.function
            def twice() -> None:
                other.enqueue(w.read_value())
                other.enqueue(w.read_value())

            seen = []
            for count in (3, 2):  # each has a trace of its own, as it happens too when an optimizer makes its slots
                strategy.run(steps, (count,))
                seen.append(outfeed.dequeue()["w"].numpy().tolist())
            other = IPUOutfeedQueue()
            with pytest.raises(ValueError, match="used twice"):
                strategy.run(twice)
        if replicas > 1:
            popdist.finalizeBackend()
        return seen


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loop_that_is_traced_again_fills_its_outfeed_queue_once(replicas: int) -> None:
    (seen,) = run_ranks(1, _loop, replicas, framework="tensorflow")
    assert seen == [[[step] * replicas if replicas > 1 else step for step in run] for run in ([1, 2, 3], [4, 5])]
