"""The collectives in TensorFlow's three modes: eager, in functions, in graphs with a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks
from later import later

hvd, tf = later("horovod.tensorflow"), later("tensorflow")


def _run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(size, function, *args, framework="tensorflow")


def _in_mode(mode: str, function: Callable[..., Any], *arrays: Any) -> list[Any]:
    """Call ``function`` of tensors and return what it gives as arrays."""
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            return session.run(list(function(*(tf.constant(array) for array in arrays))))
    callee = tf.function(function) if mode == "function" else function
    return [tensor.numpy() for tensor in callee(*(tf.constant(array) for array in arrays))]


def _every_collective(mode: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = np.arange(6, dtype=np.float64).reshape(3, 2) + rank
    rows = np.full((rank + 1, 2), rank, np.int32)

    def everything(x: Any, y: Any) -> list[Any]:
        exchanged, received = hvd.alltoall(tf.repeat(y[:1], size, axis=0), splits=[1] * size)
        return [
            hvd.allreduce(x, name="average"),
            hvd.allreduce(x, op=hvd.Max, name="max"),
            *hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, prescale_factor=0.5, name="group"),
            hvd.allgather(y, name="gather"),
            *hvd.grouped_allgather([y, y], name="gathers"),
            hvd.broadcast(x, size - 1, name="broadcast"),
            exchanged,
            received,
            hvd.alltoall(tf.range(size) + rank),
            hvd.reducescatter(x, op=hvd.Sum, name="scatter"),
            *hvd.grouped_reducescatter([x, x]),
            hvd.size_op(),
            hvd.rank_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
            hvd.process_set_included_op(77),
        ]

    found = _in_mode(mode, everything, mine, rows)
    ranks = np.arange(size)
    base = np.arange(6).reshape(3, 2)
    gathered = np.repeat(ranks, ranks + 1)[:, None] * np.ones((1, 2))
    share = np.array_split(size * base + ranks.sum(), size)[rank]
    wanted = [
        base + ranks.mean(), base + size - 1, 0.5 * (size * base + ranks.sum()), size * base + ranks.sum(),
        gathered, gathered, gathered, base + size - 1, ranks[:, None] * np.ones((1, 2)), np.ones(size), ranks + rank,
        share, share / size, share / size, size, rank, rank, size, 1, -3,
    ]  # fmt: skip
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_every_collective_gives_the_same_in_every_mode(mode: str, size: int) -> None:
    _run(size, _every_collective, mode)


@pytest.mark.parametrize("is_movable", [True, False], ids=["callbacks are moved", "callbacks stay"])
@pytest.mark.parametrize("mode", ["function", "session"])
@on_ranks(2, framework="tensorflow")
def test_kernels_conform_and_wait_in_the_order_of_the_program_where_callbacks_cannot_be_moved(
    mode: str, is_movable: bool
) -> None:
    from conformance import SHAPES, allreduce, moves, reducescatter
    from graph_modes import callbacks_that_cannot_be_moved

    def conform() -> None:
        allreduce(mode, "float32", "Average", SHAPES)
        allreduce(mode, "bool", "Sum", [(7,), (40_001,)])
        moves(mode, "int32")
        reducescatter(mode, "float64", "Sum")
        if mode == "function":
            _every_collective(mode)

    if is_movable:
        conform()
        return
    with callbacks_that_cannot_be_moved() as said:
        conform()
    assert len(said) == 1
    assert "TF_NUM_INTEROP_THREADS" in said[0]


@on_ranks(2, framework="tensorflow")
def test_every_dtype_of_the_engine_passes_through_functions() -> None:
    from horovod.tensorflow.adapter import DTYPES

    for dtype in DTYPES.values():
        for shape in ((), (0,), (5,), (2, 3)):

            @tf.function
            def combine(x: Any) -> tuple[Any, Any]:
                return hvd.allreduce(x, op=hvd.Sum), hvd.broadcast(x, 1)

            mine = tf.cast(tf.fill(shape, hvd.rank()), dtype)
            total, of_root = combine(mine)
            assert (total.dtype, total.shape) == (dtype, shape)
            assert np.all(tf.cast(total, tf.int32) == 1)
            assert np.all(tf.cast(of_root, tf.int32) == 1)
            again = hvd.allreduce(mine, op=hvd.Sum)
            assert (again.dtype, again.shape) == (dtype, shape)
            assert np.all(tf.cast(again, tf.int32) == 1)


def _opposite_orders() -> list[float]:
    names = [f"tensor {number}" for number in range(12)]

    @tf.function
    def step(x: Any) -> list[Any]:
        order = names if hvd.rank() == 0 else reversed(names)
        reduced = {name: hvd.allreduce(x + names.index(name), name=name, op=hvd.Sum) for name in order}
        return [reduced[name] for name in names]

    return [float(tensor) for tensor in step(tf.constant(1.0))]


def _opposite_orders_in_a_session() -> list[float]:
    names = [f"tensor{number}" for number in range(12)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        order = names if hvd.rank() == 0 else reversed(names)
        made = {name: hvd.allreduce(tf.constant(1.0 + names.index(name)), name=name, op=hvd.Sum) for name in order}
        return session.run([made[name] for name in names])


@pytest.mark.parametrize("function", [_opposite_orders, _opposite_orders_in_a_session])
def test_graphs_in_another_order_agree_with_one_thread_for_operations(function: Callable[[], list[float]]) -> None:
    results = run_ranks(2, function, env={"TF_NUM_INTEROP_THREADS": "1"}, framework="tensorflow", fresh=True)
    assert results == [[2.0 * (1 + number) for number in range(12)]] * 2


@on_ranks(2, framework="tensorflow")
def test_collectives_run_in_loops_branches_and_nested_functions() -> None:
    @tf.function
    def inner(x):
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x, steps):
        total = tf.zeros_like(x)
        for step in tf.range(steps):
            total += hvd.allreduce(x * tf.cast(step, x.dtype), name="step")
            total = inner(total) / hvd.size() if step % 2 == 0 else hvd.allreduce(total, name="odd")
        # Nothing in one pass needs the result of another, so that they may overlap.
        independent = tf.map_fn(lambda i: hvd.allreduce(x * i, name="mapped"), tf.range(8, dtype=x.dtype))
        return total, independent

    total, independent = outer(tf.constant([1.0, 2.0]) * (hvd.rank() + 1), tf.constant(5))
    np.testing.assert_allclose(total, [15.0, 30.0])
    np.testing.assert_allclose(independent, np.outer(np.arange(8), [1.5, 3.0]))


@on_ranks(2, framework="tensorflow")
def test_a_function_reduces_eager_tensors_that_it_finds_around_it() -> None:
    x = tf.constant([1.0, 2.0]) * (hvd.rank() + 1)  # has no name

    @tf.function
    def step():
        return hvd.allreduce(x), *hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum), hvd.allgather(x), hvd.broadcast(x, 1)

    for found, wanted in zip(
        step(), ([1.5, 3.0], [3.0, 6.0], [6.0, 12.0], [1.0, 2.0, 2.0, 4.0], [2.0, 4.0]), strict=True
    ):
        np.testing.assert_allclose(found, wanted)


@on_ranks(2, returns=[1, 1], framework="tensorflow")
def test_a_result_that_only_one_rank_uses_is_computed_by_all() -> int:
    @tf.function
    def step(x: Any) -> Any:
        reduced = hvd.allreduce(x, name="used by rank 0 only")
        return reduced if hvd.rank() == 0 else x

    step(tf.constant(1.0))
    return hvd.stats().operations


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@on_ranks(2, framework="tensorflow")
def test_rows_of_indexed_slices_are_gathered(mode: str) -> None:
    rank = hvd.rank()

    def reduce(values: Any, indices: Any) -> list[Any]:
        slices = tf.IndexedSlices(values, indices, dense_shape=tf.constant([4, 2]))
        averaged = hvd.allreduce(slices)
        mixed = hvd.grouped_allreduce([slices, values[:1]], op=hvd.Sum)
        return [tf.convert_to_tensor(averaged), tf.convert_to_tensor(mixed[0]), mixed[1]]

    values = np.full((rank + 1, 2), rank + 1.0)
    found = _in_mode(mode, reduce, values, np.arange(rank + 1, dtype=np.int64))
    total = np.array([[3.0, 3.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(found[0], total / 2)
    np.testing.assert_allclose(found[1], total)
    np.testing.assert_allclose(found[2], [[3.0, 3.0]])
    assert hvd.grouped_reducescatter([]) == hvd.grouped_allreduce([]) == []
    assert hvd.grouped_allreduce(None) is None, "Horovod returns it as it is"
    for function in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(ValueError, match=r"takes a list of tensors. Received: one of shape \(2,\)"):
            function(tf.ones(2))
    with pytest.raises(NotImplementedError, match="Sum and Average"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1]), tf.constant([0])), op=hvd.Max)
    with pytest.raises(NotImplementedError, match=r"gradient_predivide_factor; .* sparse_as_dense=True"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1]), tf.constant([0])), prescale_factor=0.5)


@on_ranks(3, returns=[[4.0, 2.0, 1.0, 3.0], [2.0, 1.0, 0.0, 2.0], [4.0, 2.0, 1.0, 3.0]], framework="tensorflow")
def test_graphs_of_process_sets_run_side_by_side() -> list[float]:
    pair = hvd.add_process_set([0, 2])
    odd = hvd.add_process_set([1])
    mine = pair if pair.included() else odd

    @tf.function
    def reduce(x: Any) -> list[Any]:
        return [
            hvd.allreduce(x, op=hvd.Sum, process_set=mine, name="in the set"),
            tf.cast(hvd.size_op(mine.process_set_id), x.dtype),
            tf.cast(hvd.process_set_included_op(pair.process_set_id), x.dtype),
            hvd.broadcast(x, mine.ranks[-1], process_set=mine),
        ]

    found = [float(number) for number in reduce(tf.constant(1.0 + hvd.rank()))]
    # Rank 0 coordinates the others' sets, too: it must not end before they are through.
    hvd.barrier()
    return found


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@on_ranks(2, returns=[[2.0, 1.0], [2.0, 1.0, 1.0]], framework="tensorflow")
def test_a_rank_that_joined_takes_no_part(mode: str) -> list[Any]:
    rank = hvd.rank()
    found = []
    for _ in range(rank + 1):
        found += _in_mode(mode, lambda x: [hvd.allreduce(x, op=hvd.Sum, name="batch")], np.float32(1.0))
    found += _in_mode(mode, lambda x: [hvd.join(), tf.identity(x)], np.float32(0.0))[:1]
    return [float(number) for number in found]


def _ordered_join() -> tuple[float, float, int]:
    @tf.function
    def all_in_one(x: Any) -> tuple[Any, Any, Any]:
        before = hvd.allreduce(x, name="before")
        hvd.barrier()
        last = hvd.join()
        return before, hvd.allreduce(x, name="after"), last

    before, after, last = all_in_one(tf.constant(1.0 + hvd.rank()))
    return float(before), float(after), int(last)


def test_join_and_barrier_keep_their_place_in_a_function() -> None:
    found = _run(2, _ordered_join)
    assert [one[:2] for one in found] == [(1.5, 1.5), (1.5, 1.5)]
    assert found[0][2] == found[1][2]


@on_ranks(2, framework="tensorflow")
def test_broadcast_in_place_writes_variables() -> None:
    variables = [tf.Variable(tf.fill([3], float(hvd.rank()))), tf.Variable(hvd.rank())]
    values = hvd.broadcast_(variables, root_rank=1)
    assert [float(tf.reduce_max(value)) for value in values] == [1.0, 1.0]
    assert int(variables[1]) == 1
    variables[0].assign_add([1.0, 1.0, 1.0])
    np.testing.assert_array_equal(variables[0], [2.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="takes variables"):
        hvd.broadcast_([tf.constant(1.0)], 0)


@on_ranks(2, framework="tensorflow")
def test_inputs_that_somebody_else_reads_stay_as_they_are() -> None:
    variable = tf.Variable(tf.ones([70_000]) * (1.0 + hvd.rank()))

    @tf.function
    def step(x: Any) -> tuple[Any, Any, Any]:
        own = variable.read_value()
        doubled = x * 2.0
        # Of these, only a buffer that nobody else reads may be reduced in place.
        return hvd.allreduce(own, name="own"), hvd.allreduce(doubled, name="doubled"), doubled

    x = tf.ones([70_000]) * hvd.rank()
    averages = step(x)
    np.testing.assert_array_equal(averages[0], np.full(70_000, 1.5))
    np.testing.assert_array_equal(averages[1], np.full(70_000, 1.0))
    np.testing.assert_array_equal(averages[2], np.full(70_000, 2.0 * hvd.rank()))
    np.testing.assert_array_equal(variable, np.full(70_000, 1.0 + hvd.rank()))
    np.testing.assert_array_equal(x, np.full(70_000, float(hvd.rank())))
