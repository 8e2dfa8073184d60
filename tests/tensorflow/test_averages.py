"""Averages of three ranks, whose third has no exact number: equal tensors average to themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks
from later import later

hvd, tf = later("horovod.tensorflow"), later("tensorflow")


@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
@on_ranks(3, framework="tensorflow")
def test_equal_tensors_average_to_themselves(mode: str) -> None:
    def everything(x: Any) -> list[Any]:
        found = [
            hvd.allreduce(x, name="plain"),
            hvd.allreduce(x, name="scaled", prescale_factor=0.5, postscale_factor=2.0),
            *hvd.grouped_allreduce([x, x[:2]], name="group"),
            hvd.reducescatter(x, name="scatter"),
        ]
        if mode != "jit" and x.dtype.is_floating:
            slices = tf.IndexedSlices(x, tf.range(x.shape[0]), tf.shape(x))
            found.append(tf.convert_to_tensor(hvd.allreduce(slices, name="sparse")))
        return found

    run = everything if mode == "eager" else tf.function(everything, jit_compile=mode == "jit", autograph=False)
    own = slice(300 * hvd.rank(), 300 * (hvd.rank() + 1))
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32):
        numbers = np.random.default_rng(1).normal(size=(900, 3))
        x = tf.cast(numbers if dtype.is_floating else 2_000_000_000 + 10 * numbers, dtype)
        plain, scaled, group, few, rows, *sparse = run(x)
        for got in (plain, group, *sparse, *([scaled] if dtype.is_floating else [])):
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, x)
        np.testing.assert_array_equal(few, x[:2])
        np.testing.assert_array_equal(rows, x[own])


@on_ranks(3, framework="tensorflow")
def test_rows_of_three_ranks_are_those_of_one_process() -> None:
    # A process that takes the gradient of the whole batch has one row for each use of an index. Keras 3 squares and
    # clips such rows one by one, so their sums would train differently.
    rank = hvd.rank()
    values, indices = tf.constant([[1.0, 2.0]] * (rank + 1)) * (rank + 1.0), tf.range(rank + 1)
    average = hvd.allreduce(tf.IndexedSlices(values, indices, tf.constant([4, 2])))
    np.testing.assert_array_equal(average.indices, [0, 0, 1, 0, 1, 2])
    np.testing.assert_allclose(average.values, np.outer([1, 2, 2, 3, 3, 3], [1.0, 2.0]) / 3, rtol=1e-6)
    wanted = np.outer([6.0, 5.0, 3.0, 0.0], [1.0, 2.0]) / 3
    np.testing.assert_allclose(tf.convert_to_tensor(average), wanted, rtol=1e-6)
    whole = tf.IndexedSlices(tf.ones([1, 2], tf.int32), tf.constant([rank]), tf.constant([4, 2]))
    assert hvd.allreduce(whole, op=hvd.Sum).values.dtype == tf.int32
    with pytest.raises(NotImplementedError, match=r"IndexedSlices of int32 cannot be averaged"):
        hvd.allreduce(whole)


@on_ranks(2, framework="tensorflow")
def test_factors_of_derivatives_keep_all_their_digits() -> None:
    x = tf.constant([2.0, 3.0], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        rows = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.1)
    # A factor that went through float32 would be 0.10000000149.
    np.testing.assert_allclose(tape.gradient(rows, x), [0.2, 0.2], rtol=1e-15)
