"""A request is declared once and is a number from then on: nothing is confused, forgotten or mixed up."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks

import horovod.numpy as hvd
from horovod import context
from horovod.errors import MismatchError


def _declarations(engine: Any) -> list[int]:
    """Count what the channel declares from now on."""
    count = [0]
    channel = engine.link.channel
    declare = channel.declare

    def counted(signature: int, request: Any) -> None:
        count[0] += 1
        declare(signature, request)

    channel.declare = counted
    return count


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_a_loop_declares_each_of_its_operations_once() -> None:
    count = _declarations(context.engine())
    array = np.ones(10)
    for _ in range(50):
        hvd.allreduce_(array, name="x")
        hvd.allreduce(np.ones((2, 3)))
        hvd.broadcast(array, root_rank=0)
    assert count[0] == 3


def _differences() -> None:
    """Everything that makes a request another one, under one name, in random order."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2
    rng = random.Random(7)
    arena = [hvd.zeros(6, dtype="float32") for _ in range(2)]

    def one(which: int) -> None:
        if which < 4:
            shape = [(6,), (2, 3), (3, 2), (0,)][which]
            result = hvd.allreduce(np.full(shape, float(rank)), name="x", op=hvd.Sum)
            assert result.tolist() == np.full(shape, float(total)).tolist()
        elif which < 8:
            dtype = ["int32", "int64", "float16", "float32"][which - 4]
            result = hvd.allreduce(np.full(6, rank, dtype), name="x", op=hvd.Sum)
            assert (result.dtype, result.tolist()) == (dtype, [total] * 6)
        elif which < 11:
            op = [hvd.Min, hvd.Max, hvd.Product][which - 8]
            result = hvd.allreduce(np.full(6, float(rank)), name="x", op=op)
            assert result.tolist() == [[0], [size - 1], [0]][which - 8] * 6
        elif which < 13:
            factor = [0.5, 2.0][which - 11]
            result = hvd.allreduce(np.full(6, float(rank)), name="x", op=hvd.Sum, prescale_factor=factor)
            assert result.tolist() == [total * factor] * 6
        elif which < 15:
            home = arena[which - 13]
            home[...] = rank
            assert hvd.allreduce_(home, name="x", op=hvd.Sum).tolist() == [total] * 6
        elif which == 15:
            array = np.full(6, rank, "float32")
            assert hvd.allreduce_(array, name="x", op=hvd.Sum) is array
            assert array.tolist() == [total] * 6
        elif which < 18:
            root = which - 16
            assert hvd.broadcast(np.full(2, rank), root_rank=root, name="x").tolist() == [root] * 2
        else:
            assert hvd.allgather(np.full(which - 18 + rank, rank), name="x").shape == (size * (which - 18) + total,)

    for _ in range(300):
        one(rng.randrange(21))


@pytest.mark.parametrize("capacity", ["1", "3", "1024"])
@pytest.mark.parametrize("size", [2, 3])
def test_whatever_differs_makes_another_request(size: int, capacity: str) -> None:
    run_ranks(size, _differences, env={"HOROVOD_CACHE_CAPACITY": capacity})


@on_ranks(3, env={"HOROVOD_CACHE_CAPACITY": "4"})
def test_requests_in_flight_are_never_forgotten() -> None:
    rng = random.Random(hvd.rank())
    for turn in range(10):
        names = list(range(30))
        rng.shuffle(names)
        handles = {n: hvd.allreduce_async(np.full(n + 1, turn), name=str(n), op=hvd.Sum) for n in names}
        for n in names:
            assert hvd.synchronize(handles[n]).tolist() == [turn * hvd.size()] * (n + 1)


@on_ranks(2)
def test_lines_of_code_that_no_longer_exists_are_right() -> None:
    """Code objects come and go, at the same addresses: their lines must not be mixed up."""
    for i in range(20):
        source = "\n" * i + "hvd.allreduce(numpy.ones(size), name='x')"
        exec(compile(source, f"script{i}.py", "exec"), {"hvd": hvd, "numpy": np, "size": 3})
        try:
            exec(compile(source, f"script{i}.py", "exec"), {"hvd": hvd, "numpy": np, "size": 3 + hvd.rank()})
        except MismatchError as error:
            assert str(error).count(f"script{i}.py:{i + 1}") == hvd.size()
        else:
            raise AssertionError("no error")


@on_ranks(2, returns=[2, 2])
def test_each_line_is_remembered_for_its_errors() -> int:
    count = _declarations(context.engine())
    for _ in range(10):
        hvd.allreduce(np.ones(1), name="x")
        hvd.allreduce(np.ones(1), name="x")
    return count[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks()
def test_groups_of_all_sorts() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2
    for shapes in ([(3,), (2, 2)], [(3,)], [(2, 2), (3,)], [(0,), (1,), ()], [(60_000,), (1,)], [(3,), (2, 2)]):
        for dtypes in (["float32"], ["float64", "int64"]):
            arrays = [np.full(shape, rank, dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
            for array, result in zip(arrays, hvd.grouped_allreduce(arrays, op=hvd.Sum, name="g"), strict=True):
                assert (result.dtype, result.shape) == (array.dtype, array.shape)
                assert (result == total).all()
            gathered = hvd.grouped_allgather([array.reshape(-1) for array in arrays], name="g")
            for array, result in zip(arrays, gathered, strict=True):
                assert result.tolist() == [r for r in range(size) for _ in range(array.size)]
            scattered = hvd.grouped_reducescatter([array.reshape(-1) for array in arrays], op=hvd.Sum, name="g")
            for array, result in zip(arrays, scattered, strict=True):
                assert result.shape == (array.size // size + (rank < array.size % size),)
                assert (result == total).all()
            assert hvd.grouped_allreduce_(arrays, op=hvd.Sum, name="g")[0] is arrays[0]
            assert all((array == total).all() for array in arrays)
