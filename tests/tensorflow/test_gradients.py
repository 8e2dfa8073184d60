"""Derivatives of the collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks
from later import later

hvd, tf = later("horovod.tensorflow"), later("tensorflow")


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@on_ranks(2, framework="tensorflow")
def test_derivatives_follow_the_conventions(mode: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = np.arange(1.0, 7.0).reshape(3, 2) + rank
    weight = rank + 1.0
    mean_weight, sum_weight = (size + 1) / 2, size * (size + 1) / 2

    def derivative(function: Any) -> Any:
        if mode == "session":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                x = tf.constant(mine)
                return session.run(tf.gradients(tf.reduce_sum(function(x)) * weight, [x])[0])

        def compute(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x)) * weight
            return tape.gradient(loss, x)

        return (tf.function(compute) if mode == "function" else compute)(tf.constant(mine)).numpy()

    ones = np.ones((3, 2))
    np.testing.assert_allclose(derivative(hvd.allreduce), ones * mean_weight)
    np.testing.assert_allclose(
        derivative(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)),
        ones * 6 * sum_weight,
    )
    np.testing.assert_allclose(derivative(lambda x: hvd.grouped_allreduce([x, x * x])[1]), 2 * mine * mean_weight)
    np.testing.assert_allclose(
        derivative(lambda x: hvd.allgather(x[: rank + 1]))[: rank + 1], (ones * mean_weight)[: rank + 1]
    )
    np.testing.assert_allclose(derivative(lambda x: hvd.broadcast(x, 0)), ones * (mean_weight if rank == 0 else 0))
    np.testing.assert_allclose(
        derivative(lambda x: hvd.alltoall(x[:2], splits=[1, 1])[0]), np.array([[1.0] * 2, [2.0] * 2, [0.0] * 2])
    )
    np.testing.assert_allclose(
        derivative(lambda x: hvd.reducescatter(x[:2], op=hvd.Sum)), size * np.array([[1.0] * 2, [2.0] * 2, [0.0] * 2])
    )
    is_largest = ones * (rank == size - 1)
    np.testing.assert_allclose(derivative(lambda x: hvd.allreduce(x, op=hvd.Max)), is_largest * sum_weight)
    others = np.arange(1.0, 7.0).reshape(3, 2) + (1 - rank)
    np.testing.assert_allclose(derivative(lambda x: hvd.allreduce(x, op=hvd.Product)), others * sum_weight)


@on_ranks(3, framework="tensorflow")
def test_gradients_of_gathered_rows_while_a_rank_has_joined() -> None:
    rank = hvd.rank()
    rows = tf.ones((rank, 2), tf.float64)

    def compute(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            once, again = hvd.grouped_allgather([rows, rows])
            loss = tf.reduce_sum((once + again + hvd.allgather(rows)) * [1.0, 2.0]) * (rank + 1.0)
        return tape.gradient(loss, rows)

    if rank > 0:
        for function in (compute, tf.function(compute)):
            # Ranks 1 and 2 weigh by 2 and 3, and an average is over all three ranks.
            np.testing.assert_allclose(function(rows), [[5.0, 10.0]] * rank)
    hvd.join()


@on_ranks(3, framework="tensorflow")
def test_rows_of_a_rank_that_joined_without_the_gradient_are_told() -> None:
    x = tf.ones(1)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = hvd.allgather(x)
    if hvd.rank() > 0:
        with pytest.raises(tf.errors.InvalidArgumentError, match="has rows of a rank that has called join since"):
            tape.gradient(loss, x)
    hvd.join()


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@on_ranks(2, framework="tensorflow", returns=[324.0, 0.0])
def test_all_ranks_take_part_in_the_second_derivative_of_a_broadcast(mode: str) -> float:
    """The first one is 4.5 y ** 2 on the root, whose y is 2, and zero on the other rank."""

    def compute(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = hvd.broadcast(x, 0) ** 3 * (hvd.rank() + 1.0)
            square = inner.gradient(loss, x) ** 2
        return outer.gradient(square, x)

    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.constant(2.0 + hvd.rank())
            (slope,) = tf.gradients(hvd.broadcast(x, 0) ** 3 * (hvd.rank() + 1.0), [x])
            return float(session.run(tf.gradients(slope**2, [x])[0]))
    return float((tf.function(compute) if mode == "function" else compute)(tf.constant(2.0 + hvd.rank())))


@on_ranks(2, framework="tensorflow", returns=[18.0, 18.0])
def test_a_derivative_can_be_differentiated() -> float:
    x = tf.constant(3.0)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = hvd.allreduce(x * x * x)
        slope = inner.gradient(y, x)
    return float(outer.gradient(slope, x))


# Both losses are the imaginary part of 2j * 3, and TensorFlow's gradient of it is 1j.
@on_ranks(2, framework="tensorflow", returns=[6j, 4 + 0j])
def test_gradients_of_complex_products_are_conjugate() -> complex:
    x = tf.constant(3.0 if hvd.rank() else 2j, tf.complex128)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.math.imag(hvd.allreduce(x, op=hvd.Product))
    return complex(tape.gradient(y, x))


def _normalizes(size: int) -> tuple[Any, Any, Any, Any]:
    whole = np.random.default_rng(1).normal(3.0, 2.0, (7, 4, 3))
    cuts = [0, 5, 7] if size == 2 else [0, 7]
    start, stop = cuts[hvd.rank()], cuts[hvd.rank() + 1]
    kind = hvd.SyncBatchNormalization if size > 1 else tf.keras.layers.BatchNormalization
    # Keras' own names count the layers that earlier tests have left behind on some of the ranks.
    layer = kind(name="norm", dtype="float64")
    x = tf.constant(whole[start:stop])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        loss = tf.reduce_sum(y * y * y * tf.constant(whole[start:stop]))
    return y.numpy(), tape.gradient(loss, x).numpy(), layer.moving_mean.numpy(), layer.moving_variance.numpy()


def test_sync_batch_normalization_is_that_of_the_whole_batch() -> None:
    ((y, gradient, mean, variance),) = run_ranks(1, _normalizes, 1, framework="tensorflow")
    parts = run_ranks(2, _normalizes, 2, framework="tensorflow")
    np.testing.assert_allclose(np.concatenate([part[0] for part in parts]), y, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), gradient, rtol=1e-9, atol=1e-9)
    for part in parts:
        np.testing.assert_allclose(part[2], mean, rtol=1e-12)
        np.testing.assert_allclose(part[3], variance, rtol=1e-12)


@pytest.mark.parametrize(("kind", "wanted"), [("allreduce", 2.0), ("allgather", 4.0)])
@on_ranks(2, framework="tensorflow")
def test_a_tape_does_not_keep_the_interpreter_from_an_asynchronous_kernel(kind: str, wanted: float) -> None:
    tf.config.experimental.set_synchronous_execution(False)
    try:
        x = tf.ones(4) * float(hvd.rank())
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(getattr(hvd, kind)(x))
        assert [float(total), *tape.gradient(total, x).numpy().tolist()] == [wanted, 1.0, 1.0, 1.0, 1.0]
    finally:
        tf.config.experimental.set_synchronous_execution(True)


@on_ranks(2, framework="tensorflow")
def test_graphs_find_the_largest_of_scaled_values() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    values = tf.linspace(0.5, 1.5, 33)

    def slope(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            largest = hvd.allreduce(x / (1.0 + hvd.rank()), op=hvd.Max, prescale_factor=0.3, postscale_factor=1.7)
        return tape.gradient(largest, x)

    # The gradient of the sum of both ranks' losses, of which rank 0 has the largest values.
    wanted = [2 * 0.3 * 1.7 if hvd.rank() == 0 else 0.0] * 33
    for gradient in (slope, tf.function(slope), tf.function(slope, jit_compile=True)):
        assert gradient(values).numpy().tolist() == pytest.approx(wanted)
