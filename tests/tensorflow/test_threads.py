"""Nodes that run on several threads of TensorFlow's, with whatever tensors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from harness import run_ranks


def _one_node_with_many_shapes() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    add = tf.function(
        lambda x: hvd.allreduce(x, op=hvd.Sum, name="any"), input_signature=[tf.TensorSpec(None, tf.float64)]
    )
    shapes = [(3,), (), (0, 4), (2, 3), (3, 2), (1, 6), (6,), (3,)] * 2
    found: dict[int, Any] = {}

    def call(turn: int) -> None:
        # One value for all, as it is not said whose calls meet whose on other ranks; only one shape is in flight.
        found[turn] = [add(tf.constant(1.5, tf.float64, shapes[turn])) for _ in range(2)]

    for turn in range(len(shapes)):
        threads = [threading.Thread(target=call, args=(turn,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hvd.barrier()
    for turn, shape in enumerate(shapes):
        for result in found[turn]:
            np.testing.assert_array_equal(result.numpy(), np.full(shape, 3.0))


def test_one_node_takes_one_shape_after_the_other_from_several_threads() -> None:
    run_ranks(2, _one_node_with_many_shapes, framework="tensorflow")


def _sessions_with_threads_of_their_own() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    for turn in range(8):
        config = tf.compat.v1.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=2)
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            total = hvd.allreduce(tf.constant([1.0 + turn]), op=hvd.Sum, name="total")
            for _ in range(5):
                assert session.run(total) == [2.0 + 2 * turn]


def test_threads_of_sessions_come_and_go() -> None:
    run_ranks(2, _sessions_with_threads_of_their_own, framework="tensorflow")
