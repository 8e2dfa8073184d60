"""Gradients are those of Horovod, formula by formula; double backward is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import run_ranks

import horovod.torch as hvd

KINDS = ("HalfTensor", "FloatTensor", "DoubleTensor")


def leaf(kind: str, *shape: int) -> torch.Tensor:
    torch.manual_seed(1234)
    return torch.FloatTensor(*shape).random_(-100, 100).type(f"torch.{kind}").requires_grad_()


def grad_of(x: torch.Tensor, y: torch.Tensor, upstream: torch.Tensor | None = None) -> torch.Tensor:
    y.backward(torch.ones_like(y) if upstream is None else upstream.to(y.dtype))
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
    return x.grad


def full(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full_like(x, value, requires_grad=False)


def gathers() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [3, 2, 7][:size]
    for kind in KINDS:
        upstream = torch.cat([torch.full((count, 2), float(r)) for r, count in enumerate(rows)])
        x = leaf(kind, rows[rank], 2)
        # The average of all ranks' gradients, and of it the own rows.
        assert torch.equal(grad_of(x, hvd.allgather(x), upstream), full(x, rank))
        x = leaf(kind, rows[rank], 2)
        first, second = hvd.grouped_allgather([x, 2 * x])
        torch.autograd.backward([first, second], [upstream.to(x.dtype)] * 2)
        assert torch.equal(x.grad, full(x, 3 * rank))


def broadcasts() -> None:
    for kind in KINDS:
        for root in range(hvd.size()):
            x = leaf(kind, 4, 4)
            assert torch.equal(grad_of(x, hvd.broadcast(x, root)), full(x, 1 if hvd.rank() == root else 0))


def alltoalls() -> None:
    rank, size = hvd.rank(), hvd.size()
    for kind in KINDS:
        x = leaf(kind, size * (rank + 1), 2)
        output, received = hvd.alltoall(x, splits=torch.tensor([rank + 1] * size, dtype=torch.int32))
        assert not received.requires_grad
        assert torch.equal(grad_of(x, output), full(x, 1))
        x = leaf(kind, size, 2)
        # Rows that rank i weighs by i come back in the row that went to rank i.
        wanted = torch.arange(float(size))[:, None].expand(size, 2).to(x.dtype)
        assert torch.equal(grad_of(x, hvd.alltoall(x), torch.full((size, 2), float(rank))), wanted)


def reducescatters() -> None:
    size = hvd.size()
    for kind in KINDS:
        x = leaf(kind, 7, 2)
        assert torch.equal(grad_of(x, hvd.reducescatter(x, op=hvd.Sum)), full(x, size))
        x = leaf(kind, 7, 2)
        assert torch.equal(grad_of(x, hvd.reducescatter(x)), full(x, 1))
        x = leaf(kind, 7, 2)
        y = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        assert torch.equal(grad_of(x, y), full(x, 0.5 * size))


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
