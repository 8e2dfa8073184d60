"""Requests that are wrong by themselves."""

from __future__ import annotations

import pytest
from paper import request

from horovod.core.collectives import REDUCIBLE, check
from horovod.core.requests import ITEMSIZE, Kind, ReduceOp, Request, TensorSpec

FINE: dict[str, Request] = {
    "allreduce": request("a"),
    "scalar": request("a", shape=()),
    "empty": request("a", shape=(0, 3)),
    "group": request("a", tensors=(TensorSpec("float32", ()), TensorSpec("int8", (2,)))),
    "allgather": request("a", Kind.ALLGATHER),
    "scalar broadcast": request("a", Kind.BROADCAST, shape=(), root=2),
    "even alltoall": request("a", Kind.ALLTOALL, shape=(6,)),
    "alltoall of nothing": request("a", Kind.ALLTOALL, shape=(0, 2)),
    "alltoall with splits": request("a", Kind.ALLTOALL, shape=(5,), splits=(0, 4, 1)),
    "reducescatter of fewer rows than ranks": request("a", Kind.REDUCESCATTER, shape=(1,)),
    "barrier": request("", Kind.BARRIER),
    "join": request("join", Kind.JOIN),
}

WRONG: dict[str, tuple[Request, str]] = {
    "dtype": (request("a", dtype="float8_e4m3fn"), "Tensor type float8_e4m3fn is not supported"),
    "dtype inside a group": (
        request("a", tensors=(TensorSpec("float32", (1,)), TensorSpec("str", (1,)))),
        "Tensor type str is not supported",
    ),
    "adasum of integers": (request("a", op=ReduceOp.ADASUM, dtype="int32"), "Adasum of int32 tensors is not defined"),
    "average of bool": (request("a", op=ReduceOp.AVERAGE, dtype="bool"), "use one of Max, Min, Product, Sum"),
    "max of complex": (request("a", op=ReduceOp.MAX, dtype="complex64"), "Max of complex64 tensors is not defined"),
    "scalar allgather": (request("a", Kind.ALLGATHER, shape=()), "use reshape(1)"),
    "scalar alltoall": (request("a", Kind.ALLTOALL, shape=()), "without dimensions"),
    "scalar reducescatter": (request("a", Kind.REDUCESCATTER, shape=()), "without dimensions"),
    "root out of range": (request("a", Kind.BROADCAST, root=3), "broadcast received invalid root rank 3"),
    "negative root": (request("a", Kind.BROADCAST, root=-1), "invalid root rank -1"),
    "indivisible alltoall": (request("a", Kind.ALLTOALL, shape=(4,)), "4 rows to 3 ranks: not divisible"),
    "too few splits": (request("a", Kind.ALLTOALL, shape=(4,), splits=(2, 2)), "2 splits for 3 ranks: [2, 2]"),
    "negative split": (request("a", Kind.ALLTOALL, shape=(4,), splits=(5, -1, 0)), "negative split: [5, -1, 0]"),
    "more rows than can be told": (
        request("a", Kind.ALLTOALL, shape=(2**31 + 1, 0), splits=(2**31, 1, 0)),
        "at most 2147483647 rows",
    ),
    "splits too large": (request("a", Kind.ALLTOALL, shape=(4,), splits=(2, 2, 1)), "5 rows, for a tensor of 4"),
    "splits too small": (request("a", Kind.ALLTOALL, shape=(4,), splits=(1, 1, 1)), "3 rows, for a tensor of 4"),
}


@pytest.mark.parametrize("case", FINE)
def test_fine(case: str) -> None:
    assert check(FINE[case], (0, 1, 2), 1) == ""


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case: str) -> None:
    wanted, text = WRONG[case]
    assert text in check(wanted, (0, 1, 2), 1)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_not_a_member(kind: Kind) -> None:
    text = check(request("a", kind, process_set=4), (0, 2), 1)
    assert text.endswith("on process set 4, of which rank 1 is not a member: it holds [0, 2]")


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_no_such_process_set(kind: Kind) -> None:
    assert "process set 4, which does not exist" in check(request("a", kind, process_set=4), None, 1)


def test_root_must_be_a_member_of_the_process_set() -> None:
    assert "members are [0, 2]" in check(request("a", Kind.BROADCAST, process_set=4, root=1), (0, 2), 0)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_can_be_summed_and_multiplied(dtype: str) -> None:
    assert {ReduceOp.SUM, ReduceOp.PRODUCT} <= REDUCIBLE[dtype]
    assert (ReduceOp.ADASUM in REDUCIBLE[dtype]) == ("float" in dtype)
