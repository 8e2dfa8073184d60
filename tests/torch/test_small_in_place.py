"""Little data in place: what autograd knows of it, and what is in it."""

from __future__ import annotations

import gc
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_ranks

import horovod.torch as hvd

DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool", "complex64"]
OPS = {"sum": hvd.Sum, "average": hvd.Average, "max": hvd.Max}


def in_place(dtype: str) -> list[str]:
    kind, bad = getattr(torch, dtype), []
    for name, op in OPS.items():
        if dtype in ("bool", "complex64") and name != "sum":
            continue
        for count in (1, 3, 1000, 16384, 50_000):
            for turn in range(6):
                row = torch.arange(count).add(turn + hvd.rank()).remainder(5).to(kind)
                mine, want = row.clone(), hvd.allreduce(row, op=op, name=f"{name} {count}")
                hvd.allreduce_(mine, op=op, name=f"{name} {count}")
                if not torch.equal(mine, want):
                    bad.append(f"{name} {count} {turn}")
                if count < 3:
                    continue
                # In the middle of a larger one, with other neighbours each time.
                whole = torch.zeros(count + 2, dtype=kind)
                whole[1:-1] = row
                hvd.allreduce_(whole[1:-1], op=op, name=f"{name} {count}")
                if not torch.equal(whole[1:-1], want) or whole[0] or whole[-1]:
                    bad.append(f"{name} {count} {turn} middle")
    return bad


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_gives_what_a_new_tensor_holds(dtype: str) -> None:
    assert run_ranks(2, in_place, dtype) == [[], []]


def versions() -> list[Any]:
    found: list[Any] = []
    x = torch.ones(8)
    for _ in range(5):
        before = x._version
        hvd.allreduce_(x, op=hvd.Sum, name="x")
        found.append(x._version > before)
    leaf = torch.ones(8, requires_grad=True)
    y = leaf * 2
    z = y.sin().sum()
    for _ in range(5):
        with torch.no_grad():
            hvd.allreduce_(y, op=hvd.Sum, name="y")
    try:
        z.backward()
    except RuntimeError as error:
        found.append(str(error))
    with torch.inference_mode():
        frozen = torch.ones(4)
        for _ in range(5):
            hvd.allreduce_(frozen, op=hvd.Max, name="frozen")
    found.append(frozen.tolist())
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    for _ in range(3):
        hvd.allreduce_(parameter.data, op=hvd.Max, name="parameter")
    found.append(parameter.tolist())
    return found


def test_autograd_knows_what_was_changed() -> None:
    for found in run_ranks(2, versions):
        assert found[:5] == [True] * 5
        assert "modified by an inplace operation" in found[5]
        assert found[6:] == [[1.0] * 4, [1.0] * 3]


def recycled(steps: int) -> int:
    """Tensors of changing shapes, in memory that others have just given back."""
    rng, bad = random.Random(0), 0
    for step in range(steps):
        shape = rng.choice([(4,), (2, 2), (4, 1), (16,), (4, 4), (1000,)])
        x = torch.full(shape, float(step + hvd.rank()))
        hvd.allreduce_(x, op=hvd.Sum, name=f"of {shape}")
        bad += not torch.equal(x, torch.full(shape, 2.0 * step + 1))
        del x
        if step % 50 == 0:
            gc.collect()
    return bad


def test_an_address_is_no_tensor() -> None:
    assert run_ranks(2, recycled, 300) == [0, 0]


def overflowing() -> list[Any]:
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="warn"):
        warnings.simplefilter("always")
        x = torch.full((4,), 3e38)
        for _ in range(3):
            hvd.allreduce_(x, op=hvd.Sum, name="x")
        y = torch.full((4,), float("inf") if hvd.rank() else -float("inf"))
        hvd.allreduce_(y, op=hvd.Sum, name="x")
    return [x.tolist(), y.isnan().all().item(), [str(one.message) for one in caught]]


def test_overflow_is_a_result_without_a_warning() -> None:
    assert run_ranks(2, overflowing) == [[[float("inf")] * 4, True, []]] * 2
