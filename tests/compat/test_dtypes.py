"""The table of dtypes is what the code allows, and what it allows works."""

from __future__ import annotations

import runpy

import numpy as np
import pytest
import torch
from harness import run_ranks
from sources import ROOT

import horovod.numpy
import horovod.torch as hvd
from horovod.core import collectives
from horovod.core.requests import ITEMSIZE, ReduceOp


def test_the_page_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "dtypes.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "scripts" / "dtypes.py"))["markdown"]()
    assert page == made, "python scripts/dtypes.py > docs/dtypes.md"


def reduced(ops: list[ReduceOp]) -> dict[tuple[str, str, str], list[float] | str]:
    """Return each framework's result for [1, 0] on rank 0 and [1, 1] on rank 1, or the kind of its refusal."""
    found: dict[tuple[str, str, str], list[float] | str] = {}
    for dtype in ITEMSIZE:
        calls = {"torch": lambda op: hvd.allreduce(torch.tensor([1, hvd.rank()]).to(getattr(torch, dtype)), op=op)}
        if dtype != "bfloat16":
            calls["numpy"] = lambda op: horovod.numpy.allreduce(np.array([1, hvd.rank()]).astype(dtype), op=op)
        for framework, call in calls.items():
            for op in ops:
                try:
                    result = call(op)
                    assert str(result.dtype).rpartition(".")[2] == dtype
                    found[framework, dtype, op.name] = [complex(value).real for value in result.tolist()]
                except ValueError:
                    found[framework, dtype, op.name] = "ValueError"
    return found


def wanted(dtype: str, op: ReduceOp) -> list[float] | str:
    if op not in collectives.REDUCIBLE[dtype]:
        return "ValueError"
    whole = "int" in dtype
    table = {
        "SUM": [1, 1] if dtype == "bool" else [2, 1],
        "AVERAGE": [1, 0] if whole else [1, 0.5],
        "MIN": [1, 0],
        "MAX": [1, 1],
        "PRODUCT": [1, 0],
        # of [1, 0] and [1, 1]: 1/2 of the first, 3/4 of the second
        "ADASUM": [1.25, 0.75],
    }
    return [float(value) for value in table[op.name]]


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, str], list[float] | str]:
    one, other = run_ranks(2, reduced, list(ReduceOp))
    assert one == other
    return one


@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", list(ITEMSIZE))
def test_what_the_table_marks_works_and_the_rest_is_refused(
    found: dict[tuple[str, str, str], list[float] | str], dtype: str, op: ReduceOp
) -> None:
    assert found["torch", dtype, op.name] == wanted(dtype, op)
    if dtype != "bfloat16":
        assert found["numpy", dtype, op.name] == wanted(dtype, op)
