"""Large tensors pass in small rounds with one in advance, or in large rounds; ranks may share cores or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks


@pytest.mark.parametrize("ranks", [3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "counts", [[300_001], [1_700_003], [2_000_000, 5, 130_000, 1_000_001]], ids=["one round", "several", "fused"]
)
@on_ranks()
def test_every_element_is_reduced_once(large: bool, counts: list[int]) -> None:
    import horovod.numpy as hvd
    from horovod import context

    control: Any = context.engine().transport.control
    rank, size = hvd.rank(), hvd.size()
    if rank == 0:
        control.words64[control._rounds] = large
    hvd.barrier()
    assert control.has_large_rounds is large
    for turn in range(2):
        tensors = [np.arange(count, dtype="int64") * (rank + turn) for count in counts]
        handles = [hvd.allreduce_async_(tensor, name=str(i), op=hvd.Sum) for i, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)
        factor = size * (size - 1) // 2 + turn * size
        for count, tensor in zip(counts, tensors, strict=True):
            np.testing.assert_array_equal(tensor, np.arange(count) * factor)
