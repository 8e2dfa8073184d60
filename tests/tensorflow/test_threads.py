"""Nodes that run on several threads of TensorFlow's, with whatever tensors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from harness import on_ranks
from later import later

hvd, tf = later("horovod.tensorflow"), later("tensorflow")


@on_ranks(2, framework="tensorflow")
def test_one_node_takes_one_shape_after_the_other_from_several_threads() -> None:
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


@on_ranks(2, framework="tensorflow")
def test_threads_of_sessions_come_and_go() -> None:
    for turn in range(8):
        config = tf.compat.v1.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=2)
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            total = hvd.allreduce(tf.constant([1.0 + turn]), op=hvd.Sum, name="total")
            for _ in range(5):
                assert session.run(total) == [2.0 + 2 * turn]


@on_ranks(1, framework="tensorflow")
def test_idle_threads_of_a_rank_with_one_core_do_not_look_for_work() -> None:
    import types
    from unittest import mock

    from tensorflow.python.eager import context as eager_context

    from horovod.tensorflow.unsafe import calm, let_idle_threads_sleep

    one_core, none = {"TF_NUM_INTRAOP_THREADS": "1"}, types.SimpleNamespace()
    for environ, handle, config, calms in (
        (one_core, None, None, True),
        ({"TF_NUM_INTRAOP_THREADS": "2"}, None, None, False),
        ({}, None, None, False),
        (one_core, object(), None, False),  # its threads are there
        (one_core, None, object(), False),  # somebody has chosen
    ):
        context = types.SimpleNamespace(_context_handle=handle, _config=config)
        assert calm(context, environ) is calms
        assert (context._config is not config) is calms
    assert not calm(none, one_core)
    assert vars(none) == {}
    # The names are TensorFlow's.
    context = eager_context.Context()
    assert calm(context, one_core)
    assert context.config.experimental.disable_thread_spinning
    # Of TensorFlow 1: a context that is there already would be in the way of enable_eager_execution(config=...).
    with (
        mock.patch.dict("os.environ", one_core),
        mock.patch.object(eager_context, "_context", None),
        mock.patch.object(eager_context, "_create_context", lambda: setattr(eager_context, "_context", made)),
    ):
        made = eager_context.Context()
        let_idle_threads_sleep()
        assert eager_context.context_safe() is None
        assert eager_context.context() is made
        assert made._config.experimental.disable_thread_spinning
