"""Buckets that are reduce-scattered: each rank gets its shard of what an allreduce would give it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import run_ranks

import horovod.torch as hvd
from horovod.bindings.gradients.buckets import Bucket
from horovod.bindings.gradients.collective import Allreduce, ReduceScatter
from horovod.bindings.gradients.reducer import Reducer
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.torch.gradient_adapter import TorchGradients


def net(widths: list[int]) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1, 3), torch.nn.Linear(3, 1))


def shard_of(bucket: Bucket) -> Iterator[tuple[str, tuple[int, torch.Tensor]]]:
    """Yield this rank's parts of the gradients that some rank had: name, first element, values."""
    reduced = bucket.reduced
    for slot, offset, flag in zip(bucket.slots, bucket.layout.offsets, reduced.flags.tolist(), strict=True):
        first = max(offset, reduced.start)
        last = min(offset + slot.parameter.numel(), reduced.start + len(reduced.values))
        if first < last and flag != bucket.absent:
            values = reduced.values[first - reduced.start : last - reduced.start]
            yield slot.name, (first - offset, values.clone().float())


def gradients(collective: type, widths: list[int], compression: Any, op: int) -> tuple[list[dict[str, Any]], Any]:
    """Two steps; the last but one layer gets a gradient on rank 0 only, the last one on none."""
    model = net(widths)
    adapter = TorchGradients()
    settings = ReduceSettings(hvd.Average if op == 0 else hvd.Sum, compression=compression)
    reducer = Reducer(
        model.named_parameters(), settings, 1, (), 4096, adapter, collective(adapter.comm, settings)
    )  # fmt: skip
    found = []
    for step in range(3):
        model.zero_grad()
        batch = torch.full((2, widths[0]), float(hvd.rank() + step + 1))
        out = model[: len(widths) - 1](batch)
        if hvd.rank() == 0:
            out = model[-2](out)
        out.sum().backward()
        reducer.synchronize()
        if collective is Allreduce:
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        else:
            found.append({n: part for bucket in reducer.buckets for n, part in shard_of(bucket)})
    return found, [bucket.name for bucket in reducer.buckets]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("widths", "compression", "op"),
    [([5, 4, 1], "none", 0), ([40, 60, 1], "none", 1), ([5, 4, 1], "bf16", 0)],
    ids=["one bucket", "several buckets, sum", "bf16"],
)
def test_shards_make_up_what_an_allreduce_gives(size: int, widths: list[int], compression: str, op: int) -> None:
    def both() -> Any:
        how = getattr(hvd.Compression, compression)
        return gradients(Allreduce, widths, how, op), gradients(ReduceScatter, widths, how, op)

    results = run_ranks(size, both)
    (whole, names), _ = results[0]
    assert len(names) == (1 if widths[0] == 5 else 2)
    for step, wanted in enumerate(whole):
        # A gradient of one rank alone is there, and one of no rank is in no shard.
        assert len(wanted) == len(list(net(widths).parameters())) - 2
        together = {name: torch.full((grad.numel(),), torch.nan) for name, grad in wanted.items()}
        for _, (shards, _) in results:
            for name, (start, values) in shards[step].items():
                assert together[name][start : start + len(values)].isnan().all()
                together[name][start : start + len(values)] = values
        for name, grad in wanted.items():
            assert torch.equal(together[name], grad.reshape(-1)), name
