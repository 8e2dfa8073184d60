"""Requests that do not fit together: every rank gets one text, which lists each rank's value and line."""

from __future__ import annotations

import pytest
from paper import PaperJob, request

from horovod.core.requests import Kind, ReduceOp, TensorSpec

_TWO = (TensorSpec("float32", (4,)), TensorSpec("float32", (2, 3)))
_TWO_OTHER = (TensorSpec("float32", (4,)), TensorSpec("float32", (3, 2)))

CASES: dict[str, tuple[dict[str, object], dict[str, object], str, str, str]] = {
    # what rank 0 and 2 submit, what rank 1 does, how the text begins, their value, its value
    "kind": ({}, {"kind": Kind.BARRIER}, "Mismatched operations", "allreduce", "barrier"),
    "dtype": ({}, {"dtype": "int32"}, "Mismatched data types", "float32", "int32"),
    "shape": ({}, {"shape": (5,)}, "Mismatched ALLREDUCE tensor shapes", "[4]", "[5]"),
    "dimensions": ({}, {"shape": (2, 2)}, "Mismatched ALLREDUCE tensor shapes", "[4]", "[2, 2]"),
    "parts": ({"parts": "['a']"}, {"parts": "['b']"}, "Mismatched names of the tensors", "['a']", "['b']"),
    "op": ({}, {"op": ReduceOp.MAX}, "Mismatched reduction operations", "Sum", "Max"),
    "prescale": ({}, {"prescale": 0.5}, "Mismatched prescale and/or postscale factors", "(1.0, 1.0)", "(0.5, 1.0)"),
    "postscale": ({}, {"postscale": 2.0}, "Mismatched prescale and/or postscale factors", "(1.0, 1.0)", "(1.0, 2.0)"),
    "device": ({}, {"device": "cuda:1"}, "Mismatched ALLREDUCE CPU/GPU device selection", "cpu", "cuda"),
    "root": (
        {"kind": Kind.BROADCAST},
        {"kind": Kind.BROADCAST, "root": 2},
        "Mismatched BROADCAST root ranks",
        "0",
        "2",
    ),
    "broadcast shape": (
        {"kind": Kind.BROADCAST},
        {"kind": Kind.BROADCAST, "shape": (1,)},
        "Mismatched BROADCAST tensor shapes",
        "[4]",
        "[1]",
    ),
    "allgather tail": (
        {"kind": Kind.ALLGATHER, "shape": (2, 3)},
        {"kind": Kind.ALLGATHER, "shape": (2, 4)},
        "Mismatched ALLGATHER tensor shapes after the first dimension",
        "[3]",
        "[4]",
    ),
    "allgather dimensions": (
        {"kind": Kind.ALLGATHER, "shape": (2, 3)},
        {"kind": Kind.ALLGATHER, "shape": (2,)},
        "Mismatched number of dimensions of the ALLGATHER tensors",
        "[2]",
        "[1]",
    ),
    "alltoall tail": (
        {"kind": Kind.ALLTOALL, "shape": (3, 3)},
        {"kind": Kind.ALLTOALL, "shape": (3, 4)},
        "Mismatched ALLTOALL tensor shapes after the first dimension",
        "[3]",
        "[4]",
    ),
    "reducescatter shape": (
        {"kind": Kind.REDUCESCATTER},
        {"kind": Kind.REDUCESCATTER, "shape": (5,)},
        "Mismatched REDUCESCATTER tensor shapes",
        "[4]",
        "[5]",
    ),
    "reducescatter op": (
        {"kind": Kind.REDUCESCATTER},
        {"kind": Kind.REDUCESCATTER, "op": ReduceOp.AVERAGE},
        "Mismatched reduction operations",
        "Sum",
        "Average",
    ),
    "group length": ({}, {"tensors": _TWO}, "Mismatched number of tensors", "1", "2"),
    "group shapes": (
        {"tensors": _TWO},
        {"tensors": _TWO_OTHER},
        "Mismatched ALLREDUCE tensor shapes",
        "[[4], [2, 3]]",
        "[[4], [3, 2]]",
    ),
    "new process set": (
        {"kind": Kind.ADD_PROCESS_SET, "ranks": (0, 1)},
        {"kind": Kind.ADD_PROCESS_SET, "ranks": (0, 2)},
        "Mismatched ranks of the new process set",
        "[0, 1]",
        "[0, 2]",
    ),
    "removed process set": (
        {"kind": Kind.REMOVE_PROCESS_SET, "root": 1},
        {"kind": Kind.REMOVE_PROCESS_SET, "root": 2},
        "Mismatched process sets to remove",
        "1",
        "2",
    ),
}


def _submit(how: dict[str, object], other: dict[str, object], name: str) -> tuple[PaperJob, str]:
    job = PaperJob(3)
    requests = [request(name, site=f"train.py:{rank + 10}", **(other if rank == 1 else how)) for rank in range(3)]  # type: ignore[arg-type]
    response = job.agree(*requests)
    job.assert_quiet()
    assert response.error_type == "MismatchError"
    return job, response.error


@pytest.mark.parametrize("name", ["grad", ""])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_every_ranks_value_and_line(case: str, name: str) -> None:
    how, other, start, theirs, its = CASES[case]
    _, text = _submit(how, other, name)
    assert text.startswith(f"{start}: One rank had {theirs}, another had {its}")
    rows = [line for line in text.splitlines() if line.startswith("  rank ")]
    assert [row.split(":", 1)[0] for row in rows] == ["  rank 0", "  rank 1", "  rank 2"]
    for rank, value in enumerate([theirs, its, theirs]):
        assert f"rank {rank}: {value} " in rows[rank]
        assert rows[rank].endswith(f"at train.py:{rank + 10}")
    if name:
        assert f"{name!r}" in text
    else:  # a call about process sets takes no name
        assert ("give them a name=" in text) is ("process set" not in case)


def test_other_operations_without_a_name_point_to_a_call_that_was_left_out() -> None:
    _, text = _submit({}, {"kind": Kind.BARRIER}, "")
    assert "Most likely a rank has left out one of these calls" in text
    assert "if hvd.rank() == 0:" in text


@pytest.mark.parametrize("name", ["grad", ""])
def test_the_job_goes_on_after_a_mismatch(name: str) -> None:
    job, _ = _submit({}, {"shape": (5,)}, name)
    assert job.agree(request(name, shape=(5,))).error == ""


def test_a_mismatch_is_found_again_when_it_happens_again() -> None:
    job = PaperJob(2)
    for _ in range(3):
        assert job.agree(request("a", shape=(0,)), request("a", shape=(1,))).error_type == "MismatchError"


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [(Kind.ALLGATHER, [(0, 3), (2, 3), (7, 3)]), (Kind.ALLTOALL, [(3, 2), (0, 2), (6, 2)])],
)
def test_the_first_dimension_may_differ(kind: Kind, shapes: list[tuple[int, ...]]) -> None:
    response = PaperJob(3).agree(*(request("a", kind, shape=shape) for shape in shapes))
    assert response.error == ""
    assert [r.tensors[0].shape for r in response.requests] == shapes


def test_device_numbers_may_differ() -> None:
    assert PaperJob(2).agree(request("a", device="cuda:0"), request("a", device="cuda:1")).error == ""


def test_like_requests_travel_once_in_the_response() -> None:
    response = PaperJob(3).agree(*(request("a", site=f"a.py:{rank}") for rank in range(3)))
    assert response.requests == (request("a"),)
    assert response.request_of(2) == response.requests[0]
