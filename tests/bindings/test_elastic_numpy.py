"""A state of numpy arrays on real ranks of a job that is not elastic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import run_ranks

import horovod.numpy as hvd


def synced() -> Any:
    """Bring states of two ranks together, change them, and go back."""
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
def test_arrays_keep_their_memory() -> None:
    rows = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert run_ranks(2, synced) == 2 * [[True, [1.0] * 3, rows, 0, [0], [2.0] * 3, 0]]
