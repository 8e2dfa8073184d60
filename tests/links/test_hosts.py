"""Ranks of several hosts, as processes that take themselves for it: what holds on one host holds over several."""

from __future__ import annotations

import random

import numpy as np
import pytest
from harness import run_ranks

SHAPES = [(2, 2), (3, 1), (1, 1, 2)]


def _orders(count: int) -> None:
    import horovod.numpy as hvd

    rank, size = hvd.rank(), hvd.size()
    rng = random.Random(rank)
    for elements in (1, 40_000) * 3:
        numbers = list(range(count))
        rng.shuffle(numbers)
        handles = {n: hvd.allreduce_async(np.full(elements, n + rank), name=str(n), op=hvd.Sum) for n in numbers}
        rng.shuffle(numbers)
        for n in numbers:
            got, want = hvd.synchronize(handles[n]), n * size + size * (size - 1) // 2
            wrong = np.flatnonzero(got != want)
            assert not wrong.size, (elements, n, want, wrong.size, wrong[:3], got[wrong[:3]])


@pytest.mark.parametrize("hosts", SHAPES, ids=lambda hosts: "+".join(map(str, hosts)))
def test_named_operations_in_another_order_on_every_rank(hosts: tuple[int, ...]) -> None:
    run_ranks(4, _orders, 12, hosts=hosts)
