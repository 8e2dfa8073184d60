"""Gradients in a model are those of one process; double backward is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import run_ranks

import horovod.torch as hvd


def twice() -> None:
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter,
        lambda x: hvd.grouped_allreduce([x])[0], hvd.SyncBatchNorm(1).double(),
    ]  # fmt: skip
    for call in calls:
        x = torch.arange(float(2 * hvd.size()), dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(call((x * x)[:, None]).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


def in_a_model() -> None:
    """Two layers on different ranks' data: gathered features, as in a contrastive loss."""
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(0)
    weight = torch.randn(3, 3, dtype=torch.float64)
    batches = [torch.randn(2, 3, dtype=torch.float64) for _ in range(size)]

    def loss(features: torch.Tensor) -> torch.Tensor:
        return (features @ features.t()).exp().sum()

    alone = weight.clone().requires_grad_()
    loss(torch.cat([batch @ alone for batch in batches]) * 0.1).backward()
    shared = weight.clone().requires_grad_()
    loss(hvd.allgather(batches[rank] @ shared) * 0.1).backward()
    # Each rank has the part that goes through its own features; their sum is the whole.
    assert torch.allclose(hvd.allreduce(shared.grad, op=hvd.Sum), alone.grad, rtol=1e-12)


CHECKS = {f.__name__: f for f in (twice, in_a_model)}


def check(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_gradient(name: str, ranks: int) -> None:
    if (name, ranks) != ("twice", 1):  # SyncBatchNorm of one rank is torch's own
        run_ranks(ranks, check, name)
