"""Ranks that disagree: a MismatchError on every rank, with each rank's value and line of this file; then they go on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks

from horovod.errors import DuplicateNameError, HorovodInternalError, MismatchError

THIS = __file__


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def _kind(hvd: Any, rank: int) -> Any:
    return hvd.allreduce(np.ones(4)) if rank else hvd.allgather(np.ones(4))


def _shape(hvd: Any, rank: int) -> Any:
    return hvd.allreduce(np.ones(4 + rank), name="grad")


def _dtype(hvd: Any, rank: int) -> Any:
    return hvd.allreduce(np.ones(4, dtype=["float32", "float64"][rank % 2]), name="grad")


def _op(hvd: Any, rank: int) -> Any:
    return hvd.allreduce(np.ones(4), name="grad", op=[hvd.Sum, hvd.Max][rank % 2])


def _factor(hvd: Any, rank: int) -> Any:
    return hvd.allreduce(np.ones(4), name="grad", prescale_factor=1.0 + rank)


def _root(hvd: Any, rank: int) -> Any:
    return hvd.broadcast(np.ones(4), root_rank=rank, name="grad")


def _tail(hvd: Any, rank: int) -> Any:
    return hvd.allgather(np.ones((rank, 3 + rank)), name="grad")


def _all_tail(hvd: Any, rank: int) -> Any:
    return hvd.alltoall(np.ones((hvd.size(), 3 + rank)), name="grad")


def _scatter(hvd: Any, rank: int) -> Any:
    return hvd.reducescatter(np.ones(4 + rank), name="grad")


def _group(hvd: Any, rank: int) -> Any:
    return hvd.grouped_allreduce([np.ones(2), np.ones(3 + rank)], name="grad")


def _group_length(hvd: Any, rank: int) -> Any:
    return hvd.grouped_allreduce([np.ones(2)] * (rank + 1), name="grad")


#: The difference; how the text begins; rank 0's and rank 1's value in it.
CASES: dict[str, tuple[Callable[[Any, int], Any], str, str, str]] = {
    "kind": (_kind, "Mismatched operations", "allgather", "allreduce"),
    "shape": (_shape, "Mismatched ALLREDUCE tensor shapes", "[4]", "[5]"),
    "dtype": (_dtype, "Mismatched data types", "float32", "float64"),
    "op": (_op, "Mismatched reduction operations", "Sum", "Max"),
    "factor": (_factor, "Mismatched prescale and/or postscale factors", "(1.0, 1.0)", "(2.0, 1.0)"),
    "root": (_root, "Mismatched BROADCAST root ranks", "0", "1"),
    "allgather": (_tail, "Mismatched ALLGATHER tensor shapes", "[3]", "[4]"),
    "alltoall": (_all_tail, "Mismatched ALLTOALL tensor shapes", "[3]", "[4]"),
    "reducescatter": (_scatter, "Mismatched REDUCESCATTER tensor shapes", "[4]", "[5]"),
    "group": (_group, "Mismatched ALLREDUCE tensor shapes", "[[2], [3]]", "[[2], [4]]"),
    "group length": (_group_length, "Mismatched number of tensors", "1", "2"),
}


def _disagree(case: str) -> str:
    import horovod.numpy as hvd

    try:
        CASES[case][0](hvd, hvd.rank())
    except HorovodInternalError as error:
        assert type(error) is MismatchError
        # The job goes on.
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
        return str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_every_value_and_line(case: str, size: int) -> None:
    function, start, first, second = CASES[case]
    texts = run_ranks(size, _disagree, case)
    assert texts == [texts[0]] * size
    assert texts[0].startswith(f"{start}")
    assert f"One rank had {first}, another had {second}" in texts[0]
    line = inspect.getsourcelines(function)[1] + 1
    rows = [row for row in texts[0].splitlines() if row.startswith("  rank ")]
    assert len(rows) == size
    for rank, row in enumerate(rows):
        assert row.startswith(f"  rank {rank}: ")
        assert row.endswith(f"at {THIS}:{line}")
    assert f"rank 0: {first} " in rows[0]
    assert f"rank 1: {second} " in rows[1]


def _two_lines() -> str:
    import horovod.numpy as hvd

    with pytest.raises(MismatchError) as caught:
        if hvd.rank() == 0:
            hvd.allreduce(np.ones(1), name="x")
        else:
            hvd.synchronize(hvd.allreduce_async_(np.ones(2), name="x"))
    return str(caught.value)


def test_the_lines_are_those_of_each_rank() -> None:
    text = run_ranks(2, _two_lines)[0]
    lines = [int(number) for number in re.findall(r":(\d+)$", text, re.MULTILINE)]
    assert lines[1] - lines[0] == 2


@on_ranks(3)
def test_a_mismatch_concerns_its_own_handle_only() -> None:
    import horovod.numpy as hvd

    good = hvd.allreduce_async(np.ones(3), name="good", op=hvd.Sum)
    bad = hvd.allreduce_async(np.ones(3 + hvd.rank()), name="bad")
    other = hvd.allreduce_async(np.ones(3), name="other", op=hvd.Sum)
    with pytest.raises(MismatchError, match="'bad'"):
        hvd.synchronize(bad)
    for handle in (other, good):
        assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3


@on_ranks(2)
def test_the_same_name_can_be_right_and_wrong_in_turns() -> None:
    import horovod.numpy as hvd

    for _ in range(5):
        with pytest.raises(MismatchError):
            hvd.allreduce(np.ones(3 + hvd.rank()), name="x")
        assert hvd.allreduce(np.ones(3), name="x", op=hvd.Sum).tolist() == [2] * 3


@pytest.mark.parametrize(
    ("splits", "text"), [([2.0, 2.0], "integers"), ([], "empty splits"), ([[2, 2]], "one-dimensional")]
)
@on_ranks(2)
def test_wrong_splits_are_an_error_at_the_call(splits: Any, text: str) -> None:
    import horovod.numpy as hvd

    with pytest.raises(ValueError, match=text):
        hvd.alltoall(np.ones(4), splits=splits)
    hvd.barrier()


@on_ranks(2)
def test_what_is_wrong_by_itself_is_an_error_at_the_call() -> None:
    import horovod.numpy as hvd

    with pytest.raises(ValueError, match=r"invalid root rank 2; members are \[0, 1\]"):
        hvd.broadcast(np.ones(1), root_rank=2)
    with pytest.raises(TypeError, match="root_rank must be an integer"):
        hvd.broadcast(np.ones(1), root_rank=0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not divisible"):
        hvd.alltoall(np.ones(3))
    with pytest.raises(ValueError, match="op must be"):
        hvd.allreduce(np.ones(1), op=17)
    with pytest.raises(ValueError, match="Average of a bool tensor"):
        hvd.allreduce(np.ones(1, dtype=bool), op=hvd.Average)
    with pytest.raises(ValueError, match="first dimension"):
        hvd.allgather(np.array(1.0))
    with pytest.raises(ValueError, match="not supported"):
        hvd.allreduce(np.array(["text"]))
    with pytest.raises(TypeError, match="numpy array"):
        hvd.allreduce([1.0, 2.0])
    with pytest.raises(ValueError, match="empty list"):
        hvd.grouped_allreduce([])
    with pytest.raises(ValueError, match="not created"):
        hvd.poll(12345)
    assert hvd.synchronize(12345) is None
    # Nothing of this was submitted.
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2]


def _duplicate() -> tuple[str, int]:
    import horovod.numpy as hvd

    line = _line() + 1
    first = hvd.allreduce_async(np.ones(1), name="x", op=hvd.Sum) if hvd.rank() == 0 else 0
    if hvd.rank() == 0:
        with pytest.raises(DuplicateNameError) as caught:
            hvd.allreduce_async(np.ones(1), name="x")
        # Another kind, and another process set, have names of their own.
        other = hvd.allgather_async(np.ones(1), name="x")
        hvd.barrier()
        assert hvd.synchronize(first).tolist() == [2]
        hvd.synchronize(other)
        # Free again.
        hvd.allreduce(np.ones(1), name="x")
        return str(caught.value), line
    # Rank 0 has met the error when it comes to the barrier.
    hvd.barrier()
    hvd.allreduce(np.ones(1), name="x", op=hvd.Sum)
    hvd.allgather(np.ones(1), name="x")
    hvd.allreduce(np.ones(1), name="x")
    return "", 0


def test_a_name_in_flight_is_refused_with_the_line_of_the_other() -> None:
    text, line = run_ranks(2, _duplicate)[0]
    assert "x' is still in flight" in text
    assert f"{THIS}:{line}" in text
