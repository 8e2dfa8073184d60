"""Little data in place: what autograd knows of it, and what is in it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from harness import on_ranks

import horovod.torch as hvd


@on_ranks(2)
def test_autograd_knows_what_was_changed() -> None:
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
    assert found[:5] == [True] * 5
    assert "modified by an inplace operation" in found[5]
    assert found[6:] == [[1.0] * 4, [1.0] * 3]


@on_ranks(2, returns=[[[float("inf")] * 4, True, []]] * 2)
def test_overflow_is_a_result_without_a_warning() -> list[Any]:
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="warn"):
        warnings.simplefilter("always")
        x = torch.full((4,), 3e38)
        for _ in range(3):
            hvd.allreduce_(x, op=hvd.Sum, name="x")
        y = torch.full((4,), float("inf") if hvd.rank() else -float("inf"))
        hvd.allreduce_(y, op=hvd.Sum, name="x")
    return [x.tolist(), y.isnan().all().item(), [str(one.message) for one in caught]]
