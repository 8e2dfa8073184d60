"""Sums of two ranks on two hosts, which the engine between them makes."""

from __future__ import annotations

import itertools

import numpy as np

__all__ = ["sums_of_a_pair"]


def sums_of_a_pair() -> None:
    """Between two ranks on two hosts the engine adds up large tensors, and rounds as numpy does."""
    import torch

    import horovod.torch as hvd
    from horovod import context
    from horovod.transports.groups import AddingGroup
    from horovod.transports.hierarchical import allreduce as routine

    rank, size = hvd.rank(), hvd.size()
    pair = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    added, usual = [], routine._add
    routine._add = lambda group, stream: added.append(len(stream.inputs)) or usual(group, stream)  # type: ignore[func-returns-value]
    try:
        for dtype, op, before, after in itertools.product(
            ("float32", "float64"), (hvd.Sum, hvd.Average), (1.0, 0.5, 0.3), (1.0, 0.25)
        ):
            if rank not in pair.ranks:
                continue
            counts = (20_001, 200_003, 300_007)
            mine, other = (
                [np.random.default_rng([one, count]).normal(size=count).astype(dtype) for count in counts]
                for one in (rank, size - 1 - rank)
            )
            how = {"op": op, "prescale_factor": before, "postscale_factor": after, "process_set": pair}
            want = [
                a * np.dtype(dtype).type(before) + b * np.dtype(dtype).type(before)
                for a, b in zip(mine, other, strict=True)
            ]
            want = [total / (2 if op == hvd.Average else 1) * np.dtype(dtype).type(after) for total in want]
            tensors = [torch.from_numpy(array.copy()) for array in mine]
            found = [hvd.allreduce(tensors[0], **how), *hvd.grouped_allreduce(tensors[1:], **how)]
            for tensor, array in zip(tensors, mine, strict=True):
                np.testing.assert_array_equal(tensor, array)
            found += [hvd.allreduce_(tensors[0], **how), *hvd.grouped_allreduce_(tensors[1:], **how)]
            rounded = 0.0 if before != 0.3 else np.finfo(dtype).eps
            for result, expected in zip(found, [*want, *want], strict=True):
                np.testing.assert_allclose(result, expected, rtol=4 * rounded, atol=rounded)
    finally:
        routine._add = usual
    if rank in pair.ranks:
        can_add = isinstance(context.engine().transport._groups.group(pair.ranks), AddingGroup)
        assert set(added) == ({1, 2} if can_add else set()), "the engine adds up single tensors and groups"
    hvd.barrier()
    if size > 2:
        hvd.remove_process_set(pair)
