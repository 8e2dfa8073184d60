"""N ranks train as one process does on the concatenated batch, and all ranks hold the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import run_ranks
from later import later

hvd, tf = later("horovod.tensorflow"), later("tensorflow")

STEPS, BATCH = 6, 12


def _make(name: str) -> Any:
    return {
        "sgd": lambda: tf.keras.optimizers.SGD(0.05),
        "momentum": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: tf.keras.optimizers.Adam(0.01),
    }[name]()


def _data() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(STEPS, BATCH, 5)), rng.normal(size=(STEPS, BATCH, 2))


def _variables() -> list[Any]:
    rng = np.random.default_rng(4)
    return [tf.Variable(rng.normal(size=shape)) for shape in [(5, 8), (8,), (8, 2), (2,)]]


def _train(optimizer_name: str, mode: str, distributed: bool) -> list[Any]:
    xs, ys = _data()
    variables = _variables()
    if hvd.rank():
        for variable in variables:
            variable.assign(variable * 0.5 + 1.0)
    hvd.broadcast_variables(variables, root_rank=0)
    optimizer = _make(optimizer_name)
    optimizer.build(variables)
    w1, b1, w2, b2 = variables

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(x, w1) + b1), w2) + b2 - y))
        if distributed:
            tape = hvd.DistributedGradientTape(tape)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step) if mode == "function" else step
    rank, size = hvd.rank(), hvd.size()
    for x, y in zip(xs, ys, strict=True):
        run(tf.constant(x[rank::size]), tf.constant(y[rank::size]))
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_two_and_three_ranks_train_as_one(optimizer: str) -> None:
    (alone,) = run_ranks(1, _train, optimizer, "eager", False, framework="tensorflow")
    for mode, size in [("eager", 2), ("function", 2), ("function", 3)]:
        results = run_ranks(size, _train, optimizer, mode, True, framework="tensorflow")
        for result in results:
            for got, want in zip(result, alone, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        for other in results[1:]:
            assert all(a.tobytes() == b.tobytes() for a, b in zip(results[0], other, strict=True))


def _train_session(optimizer_name: str, passes: int, distributed: bool) -> list[Any]:
    v1 = tf.compat.v1
    xs, ys = _data()
    rank, size = hvd.rank(), hvd.size()
    make = {
        "sgd": lambda: v1.train.GradientDescentOptimizer(0.05),
        "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
        "adam": lambda: v1.train.AdamOptimizer(0.01),
    }[optimizer_name]
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.float64, [None, 5]), v1.placeholder(tf.float64, [None, 2])
        rng = np.random.default_rng(4)
        shapes = [(5, 8), (8,), (8, 2), (2,)]
        w1, b1, w2, b2 = (
            v1.get_variable(f"v{i}", initializer=rng.normal(size=shape) * (1.0 + rank))
            for i, shape in enumerate(shapes)
        )
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(x, w1) + b1), w2) + b2 - y))
        optimizer = make()
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, backward_passes_per_step=passes, average_aggregated_gradients=True
            )
        train = optimizer.minimize(loss, var_list=[w1, b1, w2, b2])
        hooks = [hvd.BroadcastGlobalVariablesHook(0)] if distributed else []
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for batch_x, batch_y in zip(xs, ys, strict=True):
                mine_x, mine_y = batch_x[rank::size], batch_y[rank::size]
                count = len(mine_x) // passes
                for part in range(passes):
                    cut = slice(part * count, (part + 1) * count)
                    session.run(train, {x: mine_x[cut], y: mine_y[cut]})
            return session.run([w1, b1, w2, b2])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_sessions_of_two_ranks_train_as_one(optimizer: str) -> None:
    (alone,) = run_ranks(1, _train_session, optimizer, 1, False, framework="tensorflow")
    for passes in (1, 3):
        for result in run_ranks(2, _train_session, optimizer, passes, True, framework="tensorflow"):
            for got, want in zip(result, alone, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
