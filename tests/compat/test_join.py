"""Ranks with different amounts of work: join, uneven_inputs, and the optimizer with both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks, on_ranks, run_ranks
from heard import heard

import horovod.torch as hvd


def operations() -> int:
    """Rank 0 has nothing to do; the others go on without it."""
    rank, size = hvd.rank(), hvd.size()
    if rank == 0:
        return hvd.join(hvd.local_rank())
    others = list(range(1, size))
    x = torch.full((6, 2), float(rank))
    values = [float(other) for other in others]
    # Until rank 0 has joined an operation waits for it; then Average still divides by all ranks.
    for op, wanted in ((hvd.Sum, sum(values)), (hvd.Average, sum(values) / size), (hvd.Max, max(values)), (hvd.Min, 1)):
        assert torch.allclose(hvd.allreduce(x, op=op), torch.full_like(x, wanted))
    assert hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Sum).tolist() == [size - 1] * 2
    pair = hvd.grouped_allreduce([x, x[:1]], op=hvd.Sum, name="pair")
    assert [float(one[0, 0]) for one in pair] == [sum(values)] * 2
    assert hvd.synchronize(hvd.allreduce_async_(x.clone(), op=hvd.Sum, name="async"))[0, 0] == sum(values)
    assert hvd.allgather(x[:1])[:, 0].tolist() == values
    assert hvd.allgather_object(rank) == others
    assert hvd.broadcast(x, size - 1)[0, 0] == size - 1
    rows = hvd.reducescatter(x, op=hvd.Sum)
    assert rows.tolist() == [[sum(values)] * 2] * (6 // len(others))
    hvd.barrier()
    with pytest.raises(hvd.HorovodInternalError, match="which has called join"):
        hvd.broadcast(x, 0)
    with pytest.raises(hvd.HorovodInternalError, match="Alltoall is not supported with Join at this time"):
        hvd.alltoall(torch.ones(size))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum).sum(), x)
    assert torch.equal(grad, torch.full_like(x, size - 1))
    return hvd.join()


@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_go_on_without_a_rank_that_joined(ranks: int) -> None:
    assert len(set(run_ranks(ranks, operations))) == 1


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def epochs(counts: list[list[int]], how: str) -> tuple[list[list[float]], list[int]]:
    """Train for some epochs; ``counts[epoch][rank]`` batches each."""
    net, last = linear(), []
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5), net.named_parameters()
    )

    def train(epoch: int) -> None:
        for step in range(counts[epoch][hvd.rank()]):
            optimizer.zero_grad()
            net(batch(hvd.rank(), 10 * epoch + step)).square().mean().backward()
            optimizer.step()

    for epoch in range(len(counts)):
        if how.startswith("join"):
            train(epoch)
            last.append(hvd.join())
        if how == "join":
            hvd.broadcast_parameters(net.state_dict(), last[-1])
            hvd.broadcast_optimizer_state(optimizer, last[-1])
        elif how == "uneven_inputs":
            with hvd.uneven_inputs(net, optimizer):
                train(epoch)
    return net.weight.tolist(), last


def reference(counts: list[list[int]]) -> list[list[float]]:
    """The same in one process: a missing batch has a gradient of zero."""
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    for epoch, there in enumerate(counts):
        for step in range(max(there)):
            optimizer.zero_grad()
            for rank, count in enumerate(there):
                if step < count:
                    (net(batch(rank, 10 * epoch + step)).square().mean() / len(there)).backward()
            optimizer.step()
    return net.weight.tolist()


@pytest.mark.parametrize("how", ["join", "uneven_inputs"])
@pytest.mark.parametrize(
    "counts", [[[2, 3], [3, 1], [2, 2]], [[0, 2], [2, 2]], [[3, 0, 1], [0, 2, 1], [1, 1, 1]]], ids=str
)
def test_training_on_uneven_epochs(counts: list[list[int]], how: str) -> None:
    ranks = len(counts[0])
    outcomes = run_ranks(ranks, epochs, counts, how)
    for weight, last in outcomes:
        assert last == outcomes[0][1]
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(reference(counts)), rtol=1e-6, atol=1e-9)


@on_ranks(3)
def test_who_joins_and_broadcasts_nothing_is_told_which_rank_has_the_steps() -> None:
    with heard() as said:
        epochs([[1, 2, 3], [2, 2, 2]], "join only")
    told = [text for text in said if "different models" in text]
    assert len(told) == (hvd.rank() == 0)
    assert all("broadcast_optimizer_state(optimizer, last) after last = hvd.join()" in text for text in told)


@on_ranks(3, returns=[(0, 3.0), (1, 3.0), (2, 3.0)])
def test_return_and_break_leave_a_block_as_its_end_does() -> Any:
    def first_even() -> int:
        with hvd.uneven_inputs():
            for number in range(10):
                hvd.allreduce(torch.ones(1), name="n")
                if number == hvd.rank():
                    return number
        return -1

    found = first_even()
    with hvd.uneven_inputs():
        if hvd.rank() == 0:
            hvd.allgather(torch.ones(2))
    return found, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def fails() -> None:
    with hvd.uneven_inputs():
        for step in range(3):
            hvd.allreduce(torch.ones(1), name=f"{step}")
            if hvd.rank() == 1 and step == 1:
                raise KeyError("bad sample")


def test_an_exception_inside_a_block_ends_the_job_and_hides_nothing() -> None:
    outcomes = Ranks(2, fails).outcomes()
    assert isinstance(outcomes[1].error, KeyError)
    assert isinstance(outcomes[0].error, hvd.HorovodInternalError)
