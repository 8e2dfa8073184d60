"""Several tensors as one operation, in place."""

from __future__ import annotations

import numpy as np
import pytest
from harness import run_ranks


def _tied(elements: int, in_arena: bool) -> None:
    import horovod.numpy as hvd

    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) / 2
    for turn in range(2):
        tied = hvd.zeros(elements) if in_arena else np.zeros(elements)
        other = np.full(3, float(turn))
        tied[:] = rank + 1
        first, second, third = hvd.grouped_allreduce_([tied, other, tied], op=hvd.Sum, name="tied")
        assert first is third is tied
        assert second is other
        np.testing.assert_array_equal(tied, np.full(elements, total))
        np.testing.assert_array_equal(other, np.full(3, turn * size))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("elements", [3, 32_768, 1 << 20])
@pytest.mark.parametrize("in_arena", [False, True], ids=["ordinary", "arena"])
def test_a_tensor_that_is_named_twice_is_reduced_once(size: int, elements: int, in_arena: bool) -> None:
    run_ranks(size, _tied, elements, in_arena)
