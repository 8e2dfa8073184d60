"""Process sets: every operation on a subset, disjoint and overlapping sets at work at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import on_ranks

import horovod.torch as hvd


def halves() -> tuple[Any, list[int]]:
    """This rank's set of even or of odd ranks, and its members; both exist on every rank."""
    sets = [hvd.add_process_set(list(range(start, hvd.size(), 2))) for start in (0, 1)]
    mine = sets[hvd.rank() % 2]
    return mine, mine.ranks


def moves() -> None:
    mine, members = halves()
    rank, count = hvd.rank(), len(members)
    assert mine.size() == count
    assert members[mine.rank()] == rank
    x = torch.full((rank + 1, 2), rank)
    gathered = hvd.allgather(x, process_set=mine)
    assert gathered[:, 0].tolist() == [member for member in members for _ in range(member + 1)]
    root = members[-1]  # a global rank
    assert hvd.broadcast(torch.tensor([rank]), root, process_set=mine).tolist() == [root]
    sent = torch.full((count,), rank)
    assert hvd.alltoall(sent, process_set=mine).tolist() == members
    received = hvd.alltoall(sent, splits=[1] * count, process_set=mine)[1]
    assert received.tolist() == [1] * count
    rows = torch.arange(float(count))
    assert hvd.reducescatter(rows, op=hvd.Sum, process_set=mine).tolist() == [mine.rank() * count]
    hvd.barrier(process_set=mine)


def objects() -> None:
    mine, members = halves()
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == members
    assert hvd.broadcast_object({"from": hvd.rank()}, members[-1], process_set=mine) == {"from": members[-1]}
    weight = torch.full((3,), float(hvd.rank()))
    hvd.broadcast_parameters([("w", weight)], members[-1], process_set=mine)
    assert weight.tolist() == [members[-1]] * 3
    optimizer = torch.optim.SGD([torch.nn.Parameter(weight)], lr=0.1 * (hvd.rank() + 1))
    hvd.broadcast_optimizer_state(optimizer, members[-1], process_set=mine)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (members[-1] + 1))


def gradients() -> None:
    mine, members = halves()
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, process_set=mine).backward(torch.full((3,), float(hvd.rank())))
    assert x.grad.tolist() == [float(sum(members))] * 3
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(hvd.allgather(x, process_set=mine).sum() * (hvd.rank() + 1), x)
    assert grad.tolist() == [sum(member + 1 for member in members) / len(members)] * 2


def trains() -> None:
    mine, members = halves()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), hvd.SyncBatchNorm(2, process_set=mine)).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), process_set=mine
    )
    for step in range(3):
        optimizer.zero_grad()
        source = torch.Generator().manual_seed(10 * step + hvd.rank())
        net(torch.randn(4, 3, generator=source, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    mine_now = net[0].weight.tolist()
    everywhere = hvd.allgather_object((members, mine_now, net[1].running_mean.tolist()))
    assert {str(one[1:]) for one in everywhere if one[0] == members} == {str((mine_now, net[1].running_mean.tolist()))}
    assert any(one[1] != mine_now for one in everywhere) or hvd.size() == 1


CHECKS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (moves, objects, gradients, trains)
}


@pytest.mark.parametrize("name", sorted(CHECKS))
@on_ranks(3)
def test_on_a_process_set(name: str) -> None:
    CHECKS[name]()
    hvd.barrier()  # rank 0 serves all sets, so it stays until all are done
