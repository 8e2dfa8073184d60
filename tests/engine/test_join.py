"""join(): ranks with less data stand by while the others go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Ranks, run_ranks

from horovod.errors import MismatchError, PeerLostError


def _epochs(named: bool, elements: int) -> list[int]:
    """Rank r has 2 r batches more than rank 0; three epochs."""
    import horovod.numpy as hvd

    rank, size = hvd.rank(), hvd.size()
    answers = []
    for epoch in range(3):
        counts = [1 + 2 * ((r + epoch) % size) for r in range(size)]
        for batch in range(counts[rank]):
            here = [r for r in range(size) if counts[r] > batch]
            name = f"grad{batch}" if named else None
            total = hvd.allreduce(np.full(elements, float(rank + 1)), name=name, op=hvd.Sum)
            assert (total == sum(r + 1 for r in here)).all()
            average = hvd.allreduce(np.full(elements, float(rank + 1)), name=name, op=hvd.Average)
            np.testing.assert_allclose(average, np.full(elements, sum(r + 1 for r in here) / size))
        answers.append(hvd.join())
        assert answers[-1] == max(range(size), key=lambda r, counts=counts: counts[r])  # type: ignore[misc]
        # Everybody takes part again.
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [size]
    return answers


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("elements", [2, 40_000], ids=["riding", "staged"])
def test_uneven_data(size: int, named: bool, elements: int) -> None:
    answers = run_ranks(size, _epochs, named, elements)
    assert answers == [answers[0]] * size


def _kinds() -> None:
    import horovod.numpy as hvd

    rank = hvd.rank()
    if rank == 1:
        assert hvd.join() in (0, 2)
        return
    ones = np.full(2, float(rank + 1))
    assert hvd.allreduce(ones, op=hvd.Min).tolist() == [1, 1]
    assert hvd.allreduce(ones, op=hvd.Max).tolist() == [3, 3]
    assert hvd.allreduce(ones, op=hvd.Product).tolist() == [3, 3]
    assert hvd.allgather(ones).tolist() == [1, 1, 3, 3]
    assert hvd.broadcast(ones, root_rank=2).tolist() == [3, 3]
    assert hvd.reducescatter(ones, op=hvd.Sum).tolist() == [4]
    assert [array.tolist() for array in hvd.grouped_allreduce([ones, ones], op=hvd.Sum)] == [[4, 4], [4, 4]]
    hvd.barrier()
    with pytest.raises(MismatchError, match=r"Alltoall is not supported with Join at this time: ranks \[1\]"):
        hvd.alltoall(np.ones(3))
    with pytest.raises(MismatchError, match=r"from rank 1, which has called join\(\)"):
        hvd.broadcast(ones, root_rank=1)
    with pytest.raises(MismatchError, match="Add process set is not supported with Join"):
        hvd.add_process_set([0, 2])
    assert hvd.join() in (0, 2)


def test_what_works_without_the_joined_and_what_does_not() -> None:
    run_ranks(3, _kinds)


def _everybody_at_once() -> int:
    import horovod.numpy as hvd

    return hvd.join()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_join_without_any_data(size: int) -> None:
    answers = run_ranks(size, _everybody_at_once)
    assert answers == [answers[0]] * size
    assert answers[0] in range(size)


def _open_handle() -> list[float]:
    import horovod.numpy as hvd

    if hvd.rank() == 1:
        handle = hvd.allreduce_async(np.array([10.0]), name="late", op=hvd.Sum)
        hvd.join()
        result: Any = hvd.synchronize(handle)
    else:
        hvd.allreduce(np.zeros(1), name="alone", op=hvd.Sum)
        result = hvd.allreduce(np.array([1.0]), name="late", op=hvd.Sum)
        hvd.join()
    return list(result)


def test_an_operation_begun_before_join_takes_part() -> None:
    assert run_ranks(2, _open_handle) == [[11.0], [11.0]]


def _in_a_set() -> None:
    import horovod.numpy as hvd

    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair).tolist() == [2]
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="more", process_set=pair).tolist() == [1]
        assert hvd.allreduce(np.ones(1), name="share", process_set=pair).tolist() == [0.5]
    elif hvd.rank() == 1:
        hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair)
    hvd.join()
    if hvd.rank() < 2:
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair).tolist() == [2]


def test_join_inside_a_process_set() -> None:
    run_ranks(3, _in_a_set)


def _forgets_to_join() -> int:
    import horovod.numpy as hvd

    hvd.allreduce(np.ones(1), name="start")
    return -1 if hvd.rank() == 1 else hvd.join()


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_ends_without_join_ends_the_wait(size: int) -> None:
    for outcome in Ranks(size, _forgets_to_join).outcomes():
        if outcome.rank == 1:
            assert outcome.value == -1
        else:
            assert isinstance(outcome.error, PeerLostError), outcome.text
            assert "rank 1 (pid" in str(outcome.error)
