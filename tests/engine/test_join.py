"""join(): ranks with less data stand by while the others go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Ranks, on_ranks, run_ranks

import horovod.numpy as hvd
from horovod.errors import PeerLostError


def _epochs(named: bool, elements: int) -> list[int]:
    """Rank r has 2 r batches more than rank 0; three epochs."""
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


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("elements", [2, 40_000], ids=["riding", "staged"])
def test_uneven_data(size: int, named: bool, elements: int) -> None:
    answers = run_ranks(size, _epochs, named, elements)
    assert answers == [answers[0]] * size


@on_ranks(2, returns=[[11.0], [11.0]])
def test_an_operation_begun_before_join_takes_part() -> list[float]:
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(np.array([10.0]), name="late", op=hvd.Sum)
        hvd.join()
        result: Any = hvd.synchronize(handle)
    else:
        hvd.allreduce(np.zeros(1), name="alone", op=hvd.Sum)
        result = hvd.allreduce(np.array([1.0]), name="late", op=hvd.Sum)
        hvd.join()
    return list(result)


@on_ranks(3)
def test_join_inside_a_process_set() -> None:
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


def _forgets_to_join() -> int:
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
