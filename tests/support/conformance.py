"""The conformance suite: every collective, in every way that matters, against numpy; run by the ranks of a job.

``test_conformance`` runs it over shared memory part by part, and over each engine between hosts in one job each.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from graph_modes import InGraphs
from jax_modes import with_64_bits
from overlapping import overlapping

#: Whose tensors can be the target of an operation.
_WRITABLE = ("torch", "numpy", "paper")
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
OPS = ["Sum", "Average", "Min", "Max", "Product"]
#: 0-d, empty, one, odd, two-dimensional, and in most dtypes larger than what is sent inline.
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (40_001,)]
#: Several staging rounds.
LARGE = [(2_000_003,)]
#: The ranks of each host, on one machine: enough to move everything as between hosts.
HOSTS = {
    "1+1": ((0,), (1,)),
    "2+2": ((0, 1), (2, 3)),
    "3+1": ((0, 1, 2), (3,)),
    "1+1+2": ((0,), (1,), (2, 3)),
}


def _hvd(library: str) -> tuple[Any, Any, Any]:
    """Return (collectives, from_numpy, to_numpy) of a library."""
    if library == "jax":
        import jax.numpy as jnp

        return importlib.import_module("horovod.jax"), lambda a, dtype: jnp.asarray(a).astype(dtype), _plain_numpy
    if library == "numpy":
        return importlib.import_module("horovod.numpy"), lambda a, dtype: a.astype(dtype), lambda t: t
    from horovod.bindings.collectives import Collectives

    if library in ("function", "session"):
        import tensorflow as tf

        return InGraphs(library), lambda a, dtype: tf.cast(tf.constant(a), dtype), _plain_numpy
    if library == "tensorflow":
        import tensorflow as tf

        from horovod.tensorflow.adapter import TensorFlowAdapter

        return Collectives(TensorFlowAdapter()), lambda a, dtype: tf.cast(tf.constant(a), dtype), _plain_numpy
    import torch

    from horovod.torch.adapter import TorchAdapter

    if library == "paper":
        from paper_device import PaperAdapter as TorchAdapter

    def make(array: Any, dtype: str) -> Any:
        return torch.from_numpy(np.asarray(array)).to(torch.get_default_device(), getattr(torch, dtype))

    def back(tensor: Any) -> Any:
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy(force=True)

    return Collectives(TorchAdapter()), make, back


def _plain_numpy(tensor: Any) -> Any:
    # numpy does not take TensorFlow's scalars of bfloat16 as they are.
    found = np.asarray(tensor.numpy() if hasattr(tensor, "numpy") else tensor)
    return found.astype(np.float32) if found.dtype.name == "bfloat16" else found


def in_64_bits(function: Callable[..., None], *args: Any) -> None:
    with with_64_bits():
        function(*args)


def _compiled(function: Any, op: Any) -> Any:
    import jax

    return jax.jit(lambda tensor: function(tensor, op=op))


def _values(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Small integers, exact in every dtype and under every reduction used here."""
    # Copied, because a library may write into what it gets, which every operation gets again.
    return _computed(rank, shape, dtype).copy()


@functools.lru_cache(64)
def _computed(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    count = int(np.prod(shape, dtype=np.int64))
    base = (np.arange(count, dtype=np.int64) * 7 + rank * 3) % 5
    if dtype == "bool":
        base = (np.arange(count) + rank) % 3 == 0
    elif dtype != "uint8":
        base = base - 2
    return base.reshape(shape)


def _expected(op: str, shape: tuple[int, ...], dtype: str, size: int) -> Any:
    stack = np.stack([np.asarray(_values(r, shape, dtype)) for r in range(size)])
    if dtype == "bool":
        return {"Sum": stack.any(0), "Max": stack.any(0), "Min": stack.all(0), "Product": stack.all(0)}[op]
    if op == "Average":
        exact = stack.astype(np.float64).sum(0) / size
        return exact if dtype.startswith(("float", "bfloat", "complex")) else np.trunc(exact)
    return {"Sum": stack.sum, "Min": stack.min, "Max": stack.max, "Product": stack.prod}[op](0)


def _tolerance(dtype: str, op: str) -> float:
    if op != "Average":
        return 0.0
    return {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-6, "complex64": 1e-6}.get(dtype, 1e-15)


def _check(got: Any, want: Any, tolerance: float, what: str) -> None:
    assert got.shape == np.shape(want), f"{what}: shape {got.shape}, expected {np.shape(want)}"
    if tolerance == 0.0:
        np.testing.assert_array_equal(got, want, err_msg=what)
    else:
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=what)


def allreduce(library: str, dtype: str, op: str, shapes: list[tuple[int, ...]]) -> None:
    hvd, make, back = _hvd(library)
    rank, size = hvd.rank(), hvd.size()
    how = getattr(importlib.import_module("horovod.bindings.reductions"), op)
    for shape in shapes:
        mine, want = make(_values(rank, shape, dtype), dtype), _expected(op, shape, dtype, size)
        tolerance = _tolerance(dtype, op)
        result = hvd.allreduce(mine, op=how)
        _check(back(result), want, tolerance, f"allreduce {op} {shape}")
        _check(back(mine), _values(rank, shape, dtype), 0.0, f"input of allreduce {op} {shape}")
        if library == "jax":
            _check(back(_compiled(hvd.allreduce, how)(mine)), want, tolerance, f"allreduce in a program {op} {shape}")
        if library not in _WRITABLE:
            continue  # tensors cannot be written
        arena = hvd.zeros(shape, dtype=dtype)
        arena[...] = mine
        _check(back(hvd.allreduce_(arena, op=how)), want, tolerance, f"allreduce_ in the arena {op} {shape}")
        _check(back(hvd.allreduce_(mine, op=how)), want, tolerance, f"allreduce_ {op} {shape}")
    many = [make(_values(rank, shape, dtype), dtype) for shape in shapes]
    for shape, result in zip(shapes, hvd.grouped_allreduce(many, op=how), strict=True):
        _check(back(result), _expected(op, shape, dtype, size), _tolerance(dtype, op), f"grouped {op} {shape}")


def moves(library: str, dtype: str) -> None:
    hvd, make, back = _hvd(library)
    rank, size = hvd.rank(), hvd.size()
    for shape in SHAPES:
        mine = make(_values(rank, shape, dtype), dtype)
        for root in {0, size - 1}:
            want = _values(root, shape, dtype)
            _check(back(hvd.broadcast(mine, root)), want, 0.0, f"broadcast {shape}")
            if library not in _WRITABLE:
                continue  # tensors cannot be written
            copy = make(_values(rank, shape, dtype), dtype)
            _check(back(hvd.broadcast_(copy, root)), want, 0.0, f"broadcast_ {shape}")
    for tail, rows in [((), 1), ((3,), 2), ((), 0), ((2, 2), 30_000)]:
        # Rank r brings r * rows rows, so rank 0 brings none.
        want = np.concatenate([_values(r, (r * rows, *tail), dtype) for r in range(size)])
        mine = make(_values(rank, (rank * rows, *tail), dtype), dtype)
        _check(back(hvd.allgather(mine)), want, 0.0, f"allgather {tail} {rows}")
        both = hvd.grouped_allgather([mine, make(_values(rank, (1,), dtype), dtype)])
        _check(back(both[0]), want, 0.0, "grouped allgather")
        _check(back(both[1]), np.concatenate([_values(r, (1,), dtype) for r in range(size)]), 0.0, "grouped allgather")
    for rows in (0, 1, 3, 40_000):
        # Rank r sends (r + i) % 3 * rows rows to rank i.
        splits = [[(r + i) % 3 * rows for i in range(size)] for r in range(size)]
        sent = [_values(r, (sum(splits[r]), 2), dtype) for r in range(size)]
        output, received = hvd.alltoall(make(sent[rank], dtype), splits=splits[rank])
        starts = [sum(splits[r][:rank]) for r in range(size)]
        want = np.concatenate([sent[r][starts[r] : starts[r] + splits[r][rank]] for r in range(size)])
        _check(back(output), want, 0.0, f"alltoall {rows}")
        assert list(received) == [splits[r][rank] for r in range(size)]
        even = make(_values(rank, (rows * size,), dtype), dtype)
        want = np.concatenate([_values(r, (rows * size,), dtype)[rank * rows : (rank + 1) * rows] for r in range(size)])
        _check(back(hvd.alltoall(even)), want, 0.0, f"even alltoall {rows}")
    hvd.barrier()


def reducescatter(library: str, dtype: str, op: str) -> None:
    hvd, make, back = _hvd(library)
    rank, size = hvd.rank(), hvd.size()
    how = getattr(importlib.import_module("horovod.bindings.reductions"), op)
    for shape in [(0,), (1,), (7, 3), (10, 0), (200_003,)]:
        mine, whole = make(_values(rank, shape, dtype), dtype), _expected(op, shape, dtype, size)
        rows, extra = divmod(shape[0], size)
        start = rank * rows + min(rank, extra)
        want = whole[start : start + rows + (rank < extra)]
        _check(back(hvd.reducescatter(mine, op=how)), want, _tolerance(dtype, op), f"reducescatter {op} {shape}")
        pair = hvd.grouped_reducescatter([mine, mine], op=how)
        _check(back(pair[1]), want, _tolerance(dtype, op), f"grouped reducescatter {op} {shape}")
        if library not in _WRITABLE:
            continue  # tensors cannot be written
        arena = hvd.zeros(shape, dtype=dtype)
        arena[...] = mine
        for found in (hvd.reducescatter(arena, op=how), *hvd.grouped_reducescatter([arena, arena], op=how)):
            _check(back(found), want, _tolerance(dtype, op), f"reducescatter in the arena {op} {shape}")
        _check(back(arena), _values(rank, shape, dtype), 0.0, f"input of reducescatter in the arena {op} {shape}")


def scaled(library: str, dtype: str) -> None:
    hvd, make, back = _hvd(library)
    size = hvd.size()
    for count in (5, 50_000):
        mine = make(np.full(count, 6), dtype)
        got = back(hvd.allreduce(mine, op=1, prescale_factor=0.5, postscale_factor=3.0))
        np.testing.assert_allclose(got, np.full(count, 9.0 * size), rtol=1e-2)
        got = back(hvd.allreduce(mine, op=0, prescale_factor=1.0, postscale_factor=0.25))
        exact = 1.5 if dtype.startswith(("float", "bfloat")) else 1.0
        np.testing.assert_allclose(got, np.full(count, exact), rtol=1e-2)


def _ops(dtype: str) -> list[str]:
    """Return the reductions that are defined for a dtype."""
    undefined = {"bool": ("Average",), "complex64": ("Min", "Max")}.get(dtype, ())
    return [op for op in OPS if op not in undefined]


def collectives(library: str, dtype: str) -> None:
    """Every collective with tensors of one dtype."""
    for op in _ops(dtype):
        allreduce(library, dtype, op, SHAPES)
        if dtype in ("int32", "float16", "float32", "float64"):
            reducescatter(library, dtype, op)
    moves(library, dtype)
    if dtype in ("int32", "int64", "float16", "bfloat16", "float32", "float64"):
        scaled(library, dtype)


def everything(thorough: bool, library: str = "torch") -> None:
    """All that the tests above do one by one, in one job."""
    for dtype, op in ((dtype, op) for dtype in DTYPES for op in _ops(dtype)):
        if thorough or (op == "Average" and dtype in ("int8", "float16", "bfloat16")) or dtype == "float32":
            allreduce(library, dtype, op, SHAPES if dtype == "float32" else [(7,), (0,), (20_001,)])
    allreduce(library, "float32", "Average", LARGE)
    for dtype in DTYPES if thorough else ["bool", "bfloat16"]:
        moves(library, dtype)
    for dtype in ["int32", "float16", "float64"] if thorough else ["int32"]:
        for op in OPS if thorough else ["Average"]:
            reducescatter(library, dtype, op)
            scaled(library, dtype)
    for one in ("numpy", library):
        _adasum(one)
        _mixed(one)
    _same_bits()
    if _hvd(library)[0].size() > 2:
        overlapping(1, steps=40)
    _many_at_once()
    _joined()


def _mixed(library: str) -> None:
    """A group of several dtypes: each is reduced, scaled and rounded as it would be alone."""
    hvd, make, back = _hvd(library)
    rank, size = hvd.rank(), hvd.size()
    for op, dtypes in (("Sum", ["bool", "float16", "int32", "float64"]), ("Average", ["float16", "int32", "float32"])):
        how = getattr(importlib.import_module("horovod.bindings.reductions"), op)
        many = [make(_values(rank, (7,), dtype), dtype) for dtype in dtypes]
        for dtype, result in zip(dtypes, hvd.grouped_allreduce(many, op=how), strict=True):
            _check(back(result), _expected(op, (7,), dtype, size), _tolerance(dtype, op), f"{dtype} among others")


def _adasum(library: str) -> None:
    from horovod.core.adasum import coefficients

    hvd, make, back = _hvd(library)
    rank, size = hvd.rank(), hvd.size()
    for count in (1, 1000, 300_001):
        every = [np.sin(np.arange(count) * (r + 1.0) + r) for r in range(size)]
        weights = coefficients([[float(a @ b) for b in every] for a in every])
        want = sum(weight * one for weight, one in zip(weights, every, strict=True))
        got = back(
            hvd.allreduce(
                make(every[rank], "float64"), op=importlib.import_module("horovod.bindings.reductions").Adasum
            )
        )
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def _same_bits() -> None:
    """Results are rounded alike on all ranks."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(hvd.rank())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for op in (hvd.Sum, hvd.Average, hvd.Product, hvd.Adasum):
            for count in (3, 5000, 700_001):
                result = hvd.allreduce(torch.randn(count).to(dtype), op=op, prescale_factor=0.3)
                bits = hvd.allgather(result.view(torch.uint8)[None])
                assert (bits == bits[:1]).all(), f"{dtype} {op} {count}"


def _many_at_once() -> None:
    """Submitted in another order on each rank, and fused as it comes."""
    import torch

    import horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    order = np.random.default_rng(rank).permutation(60)
    tensors = {i: torch.full((1 + 997 * i,), rank + float(i)) for i in range(60)}
    handles = {i: hvd.allreduce_async(tensors[i], op=hvd.Sum, name=f"many{i}") for i in order.tolist()}
    for i in range(60):
        assert (hvd.synchronize(handles[i]) == size * i + sum(range(size))).all(), i


def _joined() -> None:
    import torch

    import horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    for step in range(rank + 1):
        found = hvd.allreduce(torch.ones(50_000), op=hvd.Sum, name=f"step{step}")
        assert (found == size - step).all()
    assert hvd.join() == size - 1
