"""A state of numpy arrays on real ranks of a job that is not elastic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks

import horovod.numpy as hvd


@pytest.mark.slow
@on_ranks(2, returns=2 * [[True, [1.0] * 3, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 0, [0], [2.0] * 3, 0]])
def test_arrays_keep_their_memory() -> Any:
    """States of two ranks come together, change, and go back."""
    rank = hvd.rank()
    weights, whole = np.full(3, rank + 1.0), np.arange(6.0).reshape(2, 3) + rank
    state = hvd.elastic.NumpyState(weights=weights, columns=whole.T, epoch=rank, names=[rank])

    @hvd.elastic.run
    def train(state: Any) -> list[Any]:
        seen = [state.weights is weights, weights.tolist(), whole.tolist(), state.epoch, state.names]
        weights[:] += 1
        state.commit()
        weights[:] += 5
        state.epoch = 9
        state.restore()
        return [*seen, weights.tolist(), state.epoch]

    return train(state)


@pytest.mark.slow
@on_ranks(2, returns=2 * [[[0.0, 1.0, 2.0], 2.5, 7, [1, 1], True]])
def test_a_new_rank_takes_arrays_that_have_changed_their_shape() -> Any:
    """Rank 0's attributes are as after some steps, rank 1's as the script has made them."""
    if hvd.rank() == 0:
        state = hvd.elastic.NumpyState(losses=np.arange(3.0), best=np.array(2.5), rest=7, count=np.ones(2, int))
    else:
        state = hvd.elastic.NumpyState(losses=np.zeros(0), best=None, rest=np.zeros(4), count=np.zeros(2))
    counts = state.count

    @hvd.elastic.run
    def train(state: Any) -> list[Any]:
        kept = (state.count is counts) == (hvd.rank() == 0)
        return [state.losses.tolist(), state.best.tolist(), state.rest, state.count.tolist(), kept]

    return train(state)
