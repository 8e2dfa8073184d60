"""A framework whose tensors cannot be written: what TensorFlow and JAX rely on, shown by a toy of a few lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks

from horovod.bindings.collectives import Collectives
from horovod.bindings.numpy_adapter import ImmutableAdapter, NumpyAdapter, aligned
from horovod.core.requests import ReduceOp
from horovod.transports.kernels_numpy import numpy_dtype


class Frozen:
    """A tensor that nobody can write."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)
        self._values.flags.writeable = False

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self._values, dtype=dtype, copy=copy)


class FrozenAdapter(ImmutableAdapter):
    name = "frozen"

    def buffer(self, tensor: Any) -> Any:
        if not isinstance(tensor, Frozen):
            raise TypeError(f"expected a Frozen, received {type(tensor).__name__}")
        values = tensor._values
        return values if values.flags.c_contiguous else None

    def wrap(self, buffer: Any) -> Frozen:
        assert isinstance(buffer, np.ndarray)
        assert buffer.ctypes.data % 64 == 0
        return Frozen(buffer)


def _same(got: Any, wanted: Any) -> None:
    assert isinstance(got, Frozen)
    np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.mark.parametrize("elements", [3, 1 << 19])
@on_ranks(2)
def test_collectives_of_tensors_that_cannot_be_written(elements: int) -> None:
    hvd = Collectives(FrozenAdapter())
    rank, size = hvd.rank(), hvd.size()
    values = np.arange(size * elements, dtype=np.float32).reshape(size, elements)
    mine = Frozen(values + rank)
    total = sum(values + other for other in range(size))
    _same(hvd.allreduce(mine, op=ReduceOp.SUM, name="a"), total)
    _same(hvd.allreduce(Frozen((values + rank).T), op=ReduceOp.SUM), total.T)
    _same(hvd.synchronize(hvd.allreduce_async(mine, op=ReduceOp.SUM)), total)
    _same(hvd.allgather(Frozen(values[: rank + 1])), np.concatenate([values[: n + 1] for n in range(size)]))
    _same(hvd.broadcast(mine, 1), values + 1)
    _same(hvd.alltoall(mine), np.stack([values[rank] + other for other in range(size)]))
    rows, received = hvd.alltoall(mine, splits=[size] + [0] * (size - 1))
    _same(rows, np.concatenate([values + other for other in range(size)]) if rank == 0 else values[:0])
    np.testing.assert_array_equal(received, [size] * size if rank == 0 else [0] * size)
    _same(hvd.reducescatter(mine, op=ReduceOp.SUM), total[rank : rank + 1])
    first, second = hvd.grouped_allreduce([mine, Frozen(np.float32(3))], op=ReduceOp.SUM)
    _same(first, total)
    _same(second, 3 * size)
    _same(hvd.grouped_allgather([Frozen([rank])])[0], list(range(size)))
    _same(hvd.grouped_reducescatter([mine], op=ReduceOp.SUM)[0], total[rank : rank + 1])
    _same(hvd.allreduce(Frozen(np.zeros((0, 3)))), np.zeros((0, 3)))
    _same(hvd.zeros(3), np.zeros(3))
    halves = [(values + other).astype(numpy_dtype("bfloat16")) for other in range(size)]
    _same(hvd.allreduce(Frozen(halves[rank]), op=ReduceOp.MAX), halves[-1])
    _same(hvd.reducescatter(Frozen(halves[rank]), op=ReduceOp.MIN), halves[0][rank : rank + 1])
    _same(hvd.allgather(Frozen(halves[rank][:1])), np.concatenate([half[:1] for half in halves]))
    _same(mine, values + rank)


@on_ranks(1)
def test_in_place_operations_of_tensors_that_cannot_be_written_are_refused_at_the_call() -> None:
    hvd = Collectives(FrozenAdapter())
    tensor = Frozen(np.zeros(3))
    for attempt in (
        lambda: hvd.allreduce_(tensor),
        lambda: hvd.allreduce_async_(tensor),
        lambda: hvd.broadcast_(tensor, 0),
        lambda: hvd.grouped_allreduce_([tensor, tensor]),
    ):
        with pytest.raises(TypeError, match="a tensor of frozen cannot be written in place; use the operation without"):
            attempt()
    hvd.barrier()


def test_aligned_arrays_begin_on_a_boundary_of_64_bytes() -> None:
    for shape in ((), (0,), (3,), (5, 7), (1 << 16,)):
        array = aligned(shape, "float32")
        assert array.ctypes.data % 64 == 0
        assert array.shape == shape
        assert array.flags.c_contiguous
        assert array.flags.writeable


class _Careless(NumpyAdapter):
    """Says of every buffer that it can be written, as a first adapter of somebody's own does."""

    name = "careless"

    def target(self, tensor: Any) -> Any:
        return self.buffer(tensor)


@on_ranks(2)
def test_a_read_only_numpy_array_in_place_is_an_error_at_the_call() -> None:
    import horovod.numpy as hvd

    array = np.zeros(4)
    array.flags.writeable = False
    for attempt in (
        lambda: hvd.allreduce_(array),
        lambda: hvd.broadcast_async_(array, 0),
        lambda: hvd.grouped_allreduce_([np.zeros(4), array]),
        lambda: hvd.allreduce_(np.broadcast_to(np.zeros(1), (4,))),
    ):
        with pytest.raises(ValueError, match="read-only numpy array"):
            attempt()
    with pytest.raises(ValueError, match="a read-only tensor of careless cannot be the target"):
        Collectives(_Careless()).allreduce_(array)
    # The job goes on.
    np.testing.assert_array_equal(hvd.allreduce(array + hvd.rank(), op=hvd.Sum), np.ones(4))


@on_ranks(2)
def test_masked_elements_of_a_numpy_array_are_not_sent() -> None:
    import horovod.numpy as hvd

    array = np.ma.array([1.0, 1e20], mask=[False, True])
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, lambda masked: hvd.grouped_allreduce([masked])):
        with pytest.raises(ValueError, match="replace them first, with filled"):
            call(array)
    np.testing.assert_array_equal(hvd.allreduce(np.ma.array([1.0, 2.0])), [1.0, 2.0])
    np.testing.assert_array_equal(hvd.allreduce(array.filled(0.0)), [1.0, 0.0])


class _Quantity(np.ndarray[Any, Any]):
    """Refuses numpy's functions, as arrays with a unit do."""

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented

    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented


@pytest.mark.parametrize("kind", [np.matrix, _Quantity])
@on_ranks(2)
def test_subclasses_of_numpy_arrays_are_sent_as_arrays(kind: Any) -> None:
    import horovod.numpy as hvd

    values = np.arange(12.0).reshape(3, 4)
    mine, total = values + hvd.rank(), 2 * values + 1
    for turned in (lambda array: array, lambda array: array.T):
        own = turned(mine).view(kind)
        np.testing.assert_array_equal(hvd.allreduce(own, op=hvd.Sum), turned(total))
        np.testing.assert_array_equal(hvd.allgather(own), np.concatenate([turned(values), turned(values + 1)]))
        np.testing.assert_array_equal(hvd.broadcast(own, 1), turned(values + 1))
        target = turned(mine.copy()).view(kind)
        assert hvd.allreduce_(target, op=hvd.Sum) is target
        np.testing.assert_array_equal(target.view(np.ndarray), turned(total))
