"""Ranks that disagree: a MismatchError on every rank, with each rank's value and line of this file; then they go on."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks

from horovod.errors import DuplicateNameError, MismatchError

THIS = __file__


def _line() -> int:
    frame = inspect.currentframe()
    return frame.f_back.f_lineno


def _two_lines() -> tuple[str, int]:
    import horovod.numpy as hvd

    line = _line() + 3
    with pytest.raises(MismatchError) as caught:
        if hvd.rank() == 0:
            hvd.allreduce(np.ones(1), name="x")
        else:
            hvd.synchronize(hvd.allreduce_async_(np.ones(2), name="x"))
    return str(caught.value), line


def test_the_lines_are_those_of_each_rank() -> None:
    (text, line), (other, _) = run_ranks(2, _two_lines)
    assert text == other
    assert text.startswith("Mismatched ALLREDUCE tensor shapes: One rank had [1], another had [2]")
    rows = [row for row in text.splitlines() if row.startswith("  rank ")]
    assert [row.split()[2] for row in rows] == ["[1]", "[2]"]
    assert rows[0].endswith(f"at {THIS}:{line}")
    assert rows[1].endswith(f"at {THIS}:{line + 2}")


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
    with pytest.raises(ValueError, match="not supported"):
        hvd.allreduce(np.array(["text"]))
    with pytest.raises(TypeError, match="numpy array"):
        hvd.allreduce([1.0, 2.0])
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
