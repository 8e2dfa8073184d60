"""Process sets: every operation on a subset, disjoint and overlapping sets at work at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks

import horovod.torch as hvd


def halves() -> tuple[Any, list[int]]:
    """This rank's set of even or of odd ranks, and its members; both exist on every rank."""
    sets = [hvd.add_process_set(list(range(start, hvd.size(), 2))) for start in (0, 1)]
    mine = sets[hvd.rank() % 2]
    return mine, mine.ranks


def reduces() -> None:
    mine, members = halves()
    x = torch.full((5,), float(hvd.rank() + 1))
    values = [member + 1.0 for member in members]
    for op, wanted in ((hvd.Sum, sum(values)), (hvd.Average, sum(values) / len(values)), (hvd.Max, max(values))):
        assert hvd.allreduce(x, op=op, process_set=mine).tolist() == [wanted] * 5
        assert hvd.grouped_allreduce([x, x], op=op, process_set=mine)[1].tolist() == [wanted] * 5
        handle = hvd.allreduce_async_(x.clone(), op=op, process_set=mine, name="same in both")
        assert hvd.synchronize(handle).tolist() == [wanted] * 5
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [sum(range(1, hvd.size() + 1))] * 5


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
    assert x.grad is not None
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


def overlapping() -> None:
    """Sets that share ranks, from several threads and in another order on each rank."""
    size, rank = hvd.size(), hvd.rank()
    groups = [[r, (r + 1) % size] for r in range(size)]
    sets = [hvd.add_process_set(group) if len(set(group)) == 2 and size > 2 else None for group in groups]
    mine = [one for one in sets if one is not None and one.included()]
    if rank % 2:
        mine.reverse()
    problems: list[str] = []

    def work(one: Any) -> None:
        for step in range(20):
            got = hvd.allreduce(torch.tensor([float(rank + step)]), op=hvd.Sum, process_set=one, name=f"{step}")
            if got.item() != sum(r + step for r in one.ranks):
                problems.append(f"{one}: {got}")

    threads = [threading.Thread(target=work, args=(one,)) for one in mine]
    for thread in threads:
        thread.start()
    for step in range(20):
        assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, name=f"all.{step}").item() == size
    for thread in threads:
        thread.join()
    handles = [(hvd.allreduce_async(torch.ones(3), op=hvd.Sum, process_set=one, name="a"), one) for one in mine]
    assert [hvd.synchronize(handle).tolist() for handle, one in handles] == [[2.0] * 3 for _ in handles]
    assert not problems


def registration() -> None:
    one = hvd.ProcessSet([0])
    assert (one.process_set_id, one.size(), one.rank(), one.included()) == (None, None, None, hvd.rank() == 0)
    assert str(one) == "ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None)"
    assert hvd.add_process_set(one) is one
    assert str(one) == "ProcessSet(process_set_id=1, ranks=[0], mpi_comm=None)"
    rest = hvd.add_process_set([1, 2])
    table = hvd.mpi_ops._basics._get_process_set_ids_and_ranks
    assert table() == {0: [0, 1, 2], 1: [0], 2: [1, 2]}
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"Process is not part of provided process set\."):
            rest.rank()
        with pytest.raises(ValueError, match="of which rank 0 is no member"):
            hvd.allreduce(torch.ones(1), process_set=rest)
    hvd.barrier()
    assert hvd.remove_process_set(one)
    assert not hvd.remove_process_set(one)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert not hvd.remove_process_set(hvd.ProcessSet([1]))
    assert (one.process_set_id, one.size()) == (None, None)
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce(torch.ones(1), process_set=one)
    # Numbers of removed sets are given out again, the first one first.
    assert hvd.remove_process_set(rest)
    assert [hvd.add_process_set(ranks).process_set_id for ranks in ([0, 1], [0, 2], [1])] == [1, 2, 3]


CHECKS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (reduces, moves, objects, gradients, trains, overlapping)
}


def check(name: str) -> None:
    CHECKS[name]()
    hvd.barrier()  # rank 0 serves all sets, so it stays until all are done


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_on_a_process_set(name: str, ranks: int) -> None:
    run_ranks(ranks, check, name)


def test_sets_come_and_go() -> None:
    run_ranks(3, registration)


def static() -> None:
    even, odd, again = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1]), hvd.ProcessSet(range(0, 3, 2))
    with pytest.raises(ValueError, match="given twice"):
        hvd.init(process_sets=[even, odd, again])
    assert hvd.is_initialized()  # as in Horovod; the next call finds it so
    hvd.init(process_sets=[even, odd])
    assert [even.process_set_id, odd.process_set_id] == [1, 2]
    hvd.shutdown()
    assert [even.process_set_id, odd.process_set_id, hvd.global_process_set.process_set_id] == [None, None, 0]


def test_sets_given_to_init_twice_are_refused_and_may_be_given_again() -> None:
    run_ranks(3, static, init=False)
