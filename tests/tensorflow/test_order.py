"""Several executions under one name in one program: each rank must match the first with the first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import run_ranks
from later import later

hvd, tf = later("horovod.tensorflow"), later("tensorflow")

# Long enough that the other execution would overtake; an error shows as other contents, not as a timeout.
_LATE_S = 0.2


def _late(x: Any, rank: int) -> Any:
    """Return ``x``, but later on one rank, in an operation that nothing else is ordered after."""

    def wait(array: Any) -> Any:
        if hvd.rank() == rank:
            time.sleep(_LATE_S)
        return array

    made = tf.numpy_function(wait, [x], x.dtype, stateful=False)
    made.set_shape(x.shape)
    return made


def _two_calls_of_a_function() -> None:
    weight = tf.Variable(1.0)

    @tf.function
    def total(x: Any) -> Any:
        return hvd.allreduce(x * weight, op=hvd.Sum, name="total")

    @tf.function
    def step(x: Any) -> list[Any]:
        return [total(_late(x, 0)), total(_late(10.0 * x, 1)), total(100.0 * x)]

    for _ in range(3):
        np.testing.assert_array_equal(step(tf.constant([1.0, 2.0])), np.outer([1, 10, 100], [2.0, 4.0]))


def _two_functions_of_other_variables() -> None:
    models = [tf.Variable([1.0, 2.0]), tf.Variable([10.0, 20.0])]

    def train(model: Any, late: int) -> Any:
        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model * model) * _late(x, late)
            (grad,) = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [model])
            model.assign_sub(grad)
            return grad

        return step

    both = [train(models[0], 0), train(models[1], 1)]

    @tf.function
    def step(x: Any) -> list[Any]:
        return [one(x) for one in both]

    for factor in (1, -3, 9):  # a model times 1 - 4 x, once per step
        found = step(tf.constant(1.0))
        np.testing.assert_array_equal(found, factor * np.array([[4.0, 8.0], [40.0, 80.0]]))


def _beside_branches() -> None:
    def total(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, name="total")

    @tf.function
    def step(x: Any, flag: Any) -> list[Any]:
        first = total(_late(x, 0))
        second = tf.cond(flag, lambda: total(_late(10.0 * x, 1)), lambda: -x)
        third = tf.cond(flag, lambda: x, lambda: total(100.0 * x))
        fourth = tf.cond(flag, lambda: total(1000.0 * x), lambda: total(2000.0 * x))
        return [first, second, third, fourth]

    for _ in range(3):
        np.testing.assert_array_equal(step(tf.constant(1.0), tf.constant(True)), [2, 20, 1, 2000])
        np.testing.assert_array_equal(step(tf.constant(1.0), tf.constant(False)), [2, -1, 200, 4000])


def _in_loops() -> None:
    def late(number: Any, x: Any) -> Any:
        # No iteration needs what another one gives.
        def wait(place: Any, array: Any) -> Any:
            if place % 2 == hvd.rank():
                time.sleep(_LATE_S / 4)
            return array

        made = tf.numpy_function(wait, [number, x], x.dtype, stateful=False)
        made.set_shape(x.shape)
        return made

    @tf.function
    def step(x: Any) -> tuple[Any, Any]:
        before = hvd.allreduce(_late(x, 1), op=hvd.Sum, name="mapped")
        rows = tf.map_fn(
            lambda i: hvd.allreduce(late(i, x * tf.cast(i, x.dtype)), op=hvd.Sum, name="mapped"),
            tf.range(8),
            fn_output_signature=x.dtype,
            parallel_iterations=4,
        )
        return before, rows

    before, rows = step(tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(before, [2.0, 4.0])
    np.testing.assert_array_equal(rows, np.outer(np.arange(8), [2.0, 4.0]))


def _scopes_that_are_left_out() -> None:
    @tf.function
    def step(x: Any) -> list[Any]:
        found = []
        for number, scale in enumerate((1.0, 10.0, 100.0)):
            with tf.name_scope(f"scope_{number}"):
                late = _late(scale * x, number)
                found.append(hvd.allreduce(late, op=hvd.Sum, name="left_out", ignore_name_scope=True))
        return found

    for _ in range(3):
        np.testing.assert_array_equal(step(tf.constant(1.0)), [2, 20, 200])


def _batch_norm_of_two_batches() -> None:
    rank, size = hvd.rank(), hvd.size()
    layer = hvd.SyncBatchNormalization(name="norm", epsilon=1e-3)
    layer.build((None, 3))
    everything = np.random.default_rng(1).normal(size=(2, 4 * size, 3)) * [[[1.0]], [[9.0]]]
    batches = [tf.constant(batch[rank::size], tf.float32) for batch in everything]

    @tf.function
    def step(one: Any, two: Any) -> tuple[list[Any], list[Any]]:
        with tf.GradientTape() as tape:
            tape.watch([one, two])
            found = [layer(_late(one, 0), training=True), layer(_late(two, 1), training=True)]
            # The late ones have no gradient; what is wrong would show in these, too.
            loss = tf.reduce_sum(found[0] ** 3) + tf.reduce_sum(layer(one, training=True) ** 3)
        return found, tape.gradient(loss, [one])

    for _ in range(3):
        found, _ = step(*batches)
        for got, batch in zip(found, everything, strict=True):
            wanted = (batch - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-3)
            np.testing.assert_allclose(got, wanted[rank::size], rtol=2e-3, atol=1e-4)


def _optimizer_applied_twice() -> None:
    import horovod.tensorflow.keras as hvd

    weights = [tf.keras.Variable([1.0, 2.0]), tf.keras.Variable([5.0, 6.0])]
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.build(weights)

    @tf.function
    def step(x: Any) -> None:
        optimizer.apply([_late(x, 0), x], weights)
        optimizer.apply([_late(10.0 * x, 1), 10.0 * x], weights)

    step(tf.constant([1.0, 1.0]) * (1.0 + 2.0 * hvd.rank()))
    np.testing.assert_array_equal(weights[0], [-21.0, -20.0])
    np.testing.assert_array_equal(weights[1], [-17.0, -16.0])


def _traced_in_another_order() -> None:
    def make(scale: float) -> Any:
        return tf.function(lambda x: hvd.allreduce(scale * x, op=hvd.Sum, name=f"scaled by {scale}"))

    functions = [make(scale) for scale in (1.0, 10.0, 100.0)]
    x = tf.constant([1.0, 2.0])
    for function in functions if hvd.rank() == 0 else reversed(functions):
        function.get_concrete_function(x)

    @tf.function
    def step(x: Any) -> list[Any]:
        return [function(x) for function in functions] + [function(2.0 * x) for function in functions]

    np.testing.assert_array_equal(step(x), np.outer([1, 10, 100, 2, 20, 200], [2.0, 4.0]))


def _derivatives_of_branches_and_loops() -> None:
    @tf.function
    def product(x):
        return x * hvd.allreduce(x, name="one", op=hvd.Sum)

    @tf.function
    def slopes(x, flag, two):
        with tf.GradientTape() as tape:
            tape.watch(x)
            three = (
                product(_late(two, 0) * x)
                + product(_late(two + 1.0, 1) * x)
                + tf.cond(flag, lambda: product(x), lambda: x)
            )
            one = tf.cond(flag, lambda: hvd.allreduce(x * x, name="one", op=hvd.Sum), lambda: x)
            mapped = tf.map_fn(lambda i: hvd.allreduce(i * x, name="one", op=hvd.Sum), tf.range(4.0))
            loss = tf.reduce_sum(one) + tf.reduce_sum(mapped) * 10.0 + 100.0 * three
        return [loss, tape.gradient(loss, x)]

    for flag, loss, slope in (
        (True, 18.0 + 360.0 + 100 * 2 * 14 * 9, 12 + 120 + 100 * 4 * 14 * 3),
        (False, 3 + 360 + 100 * (2 * 13 * 9 + 3), 1 + 120 + 100 * (4 * 13 * 3 + 1)),
    ):
        found = slopes(tf.constant(3.0), tf.constant(flag), tf.constant(2.0))
        np.testing.assert_array_equal(found, [loss, slope])


def _in_programs_of_xla() -> None:
    weight = tf.Variable(1.0)

    @tf.function
    def total(x: Any) -> Any:
        return hvd.allreduce(x * weight, op=hvd.Sum, name="total")

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            # As in a program of one rank only, so that XLA may put them in another order there.
            found = [total(x) for x in ([x, 10.0 * x] if hvd.rank() else [x + 0.0, 5.0 * (x + x)])]
            found.append(hvd.allreduce(100.0 * x, op=hvd.Sum, name="total"))
            with tf.name_scope("other"):
                late = hvd.allreduce(1000.0 * x, op=hvd.Sum, name="total", ignore_name_scope=True)
                found.append(late)
            for i in tf.range(3):
                found[0] += total(tf.cast(i, x.dtype) * x)
            found.append(tf.cond(found[0][0] > 0.0, lambda: total(3.0 * x), lambda: x))
            loss = tf.reduce_sum(tf.add_n(found))
        return found, tape.gradient(loss, x)

    for _ in range(20):
        found, slope = step(tf.constant([1.0, 2.0]))
        np.testing.assert_array_equal(found, np.outer([4, 10, 100, 1000, 3], [2.0, 4.0]))
        np.testing.assert_array_equal(slope, [2 * 1117.0, 2 * 1117.0])


@pytest.mark.parametrize(
    "program",
    [
        _two_calls_of_a_function,
        _two_functions_of_other_variables,
        _beside_branches,
        _in_loops,
        _scopes_that_are_left_out,
        _batch_norm_of_two_batches,
        _optimizer_applied_twice,
        _traced_in_another_order,
        _derivatives_of_branches_and_loops,
        _in_programs_of_xla,
    ],
)
def test_executions_under_one_name_keep_the_order_of_the_program(program: Callable[[], None]) -> None:
    # Threads enough that one execution can overtake another.
    run_ranks(2, program, framework="tensorflow", env={"TF_NUM_INTEROP_THREADS": "6"})
