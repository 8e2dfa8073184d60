"""Wrong uses, and the exception that Horovod's scripts expect for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import on_ranks, run_ranks

import horovod.torch as hvd


def rows(count: int, *tail: int) -> torch.Tensor:
    return torch.ones(count, *tail)


def typed() -> torch.Tensor:
    return rows(4).type(["torch.IntTensor", "torch.FloatTensor"][hvd.rank() % 2])


# A disagreement between ranks: a RuntimeError, HorovodInternalError, on every rank.
DISAGREEMENTS: dict[str, Callable[[], Any]] = {
    "allreduce shape": lambda: hvd.allreduce(torch.ones([17] * (2 + hvd.rank() % 2))),
    "allreduce dimension": lambda: hvd.allreduce(rows(17 + hvd.rank())),
    "allreduce type": lambda: hvd.allreduce(typed()),
    "allreduce op": lambda: hvd.allreduce(rows(2), op=[hvd.Sum, hvd.Average][hvd.rank() % 2]),
    "allreduce prescale": lambda: hvd.allreduce(rows(2), prescale_factor=1.0 + hvd.rank()),
    "allreduce in place": lambda: hvd.allreduce_(rows(17 + hvd.rank())),
    "grouped allreduce": lambda: hvd.grouped_allreduce([rows(2), rows(2 + hvd.rank())]),
    "number in a group": lambda: hvd.grouped_allreduce([rows(2)] * (1 + hvd.rank())),
    "allgather shape": lambda: hvd.allgather(rows(3, 2 + hvd.rank())),
    "allgather dimensions": lambda: hvd.allgather(torch.ones([3] * (1 + hvd.rank()))),
    "allgather type": lambda: hvd.allgather(typed()),
    "grouped allgather": lambda: hvd.grouped_allgather([rows(3), rows(3, 2 + hvd.rank())]),
    "broadcast shape": lambda: hvd.broadcast(rows(3 + hvd.rank()), 0),
    "broadcast type": lambda: hvd.broadcast(typed(), 0),
    "broadcast root": lambda: hvd.broadcast(rows(3), hvd.rank()),
    "alltoall shape": lambda: hvd.alltoall(rows(6, 2 + hvd.rank())),
    "alltoall type": lambda: hvd.alltoall(typed().repeat(3)),
    "reducescatter shape": lambda: hvd.reducescatter(rows(4, 2 + hvd.rank())),
    "reducescatter rows": lambda: hvd.reducescatter(rows(4 + hvd.rank())),
    "reducescatter type": lambda: hvd.reducescatter(typed()),
    "operation": lambda: (hvd.allgather if hvd.rank() else hvd.allreduce)(rows(3)),
    "process set": lambda: hvd.add_process_set([hvd.rank()]),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(DISAGREEMENTS))
@on_ranks(3)
def test_disagreement_is_an_error_on_every_rank(case: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        DISAGREEMENTS[case]()
    assert isinstance(caught.value, hvd.HorovodInternalError)
    # The job is as good as before.
    assert hvd.allreduce(rows(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    text = str(caught.value)
    assert hvd.allgather_object(text) == [text] * hvd.size()
    assert text.startswith("Mismatched ")
    assert all(f"rank {rank}: " in text for rank in range(hvd.size()))
    assert text.count("test_errors.py:") == hvd.size()


# An argument that is wrong by itself: a ValueError at the call, before anybody waits.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: hvd.allreduce(rows(3).to(torch.float8_e4m3fn)), "Tensor type float8_e4m3fn is not supported."),
    "average of bools": (lambda: hvd.allreduce(rows(3).bool()), "use one of Max, Min, Product, Sum"),
    "adasum of integers": (lambda: hvd.allreduce(rows(3).int(), op=hvd.Adasum), "Adasum of int32 tensors"),
    "op and average": (lambda: hvd.allreduce(rows(3), average=True, op=hvd.Sum), "op parameter supersedes average"),
    "op": (lambda: hvd.allreduce(rows(3), op=9), "op must be Average, Sum"),
    "op of torch.distributed": (
        lambda: hvd.allreduce(rows(3), op=torch.distributed.ReduceOp.SUM), "op must be Average, Sum"
    ),
    "op as truth value": (lambda: hvd.allreduce(rows(3), op=True), "op must be Average, Sum"),
    "op as average": (lambda: hvd.allreduce(rows(3), hvd.Average), "did you mean op=hvd.Average?"),
    "number of a set": (lambda: hvd.allreduce(rows(3), process_set=0), "process_set must be a ProcessSet"),
    "root": (lambda: hvd.broadcast(rows(3), 99), "broadcast received invalid root rank 99"),
    "negative root": (lambda: hvd.broadcast(rows(3), -1), "broadcast received invalid root rank -1"),
    "scalar allgather": (lambda: hvd.allgather(torch.tensor(1.0)), "without dimensions"),
    "scalar reducescatter": (lambda: hvd.reducescatter(torch.tensor(1.0)), "without dimensions"),
    "scalar alltoall": (lambda: hvd.alltoall(torch.tensor(1.0)), "without dimensions"),
    "adasum reducescatter": (lambda: hvd.reducescatter(rows(4), op=hvd.Adasum), "Received: Adasum"),
    "uneven alltoall": (lambda: hvd.alltoall(rows(hvd.size() + 1)), "not divisible"),
    "splits too many": (lambda: hvd.alltoall(rows(2), [3] * hvd.size()), "for a tensor of 2"),
    "splits too few": (lambda: hvd.alltoall(rows(9), [1] * hvd.size()), "for a tensor of 9"),
    "splits too short": (lambda: hvd.alltoall(rows(9), [9]), "1 splits for 2 ranks"),
    "splits negative": (lambda: hvd.alltoall(rows(2), [3, -1]), "negative"),
    "splits int64": (lambda: hvd.alltoall(rows(2), torch.tensor([1, 1])), "int32"),
    "splits float": (lambda: hvd.alltoall(rows(2), torch.ones(2)), "int32"),
    "splits of two dimensions": (lambda: hvd.alltoall(rows(2), torch.ones(1, 2).int()), "one-dimensional"),
    "empty group": (lambda: hvd.grouped_allreduce([]), "empty list"),
    "unregistered set": (lambda: hvd.allreduce(rows(2), process_set=hvd.ProcessSet([0])), "not registered"),
    "unregistered set of a layer": (
        lambda: hvd.SyncBatchNorm(3, process_set=hvd.ProcessSet([0, 1]))(torch.ones(2, 3)), "not registered"
    ),
    "ranks as set of a layer": (lambda: hvd.SyncBatchNorm(3, process_set=[0, 1]), "process_set must be a ProcessSet"),
    "poll": (lambda: hvd.poll(12345), "12345"),
    "groups without lists": (
        lambda: hvd.DistributedOptimizer(sgd := torch.optim.SGD([rows(2)]), groups=sgd.param_groups[0]["params"]),
        "Received: ['Tensor']",
    ),
    "optimizer before model": (lambda: hvd.uneven_inputs(torch.optim.SGD([rows(2)])).__enter__(), "in this order"),
    "set again": (lambda: hvd.add_process_set([1, 0]), "already form process set 0"),
    "set out of range": (lambda: hvd.add_process_set([0, 7]), "do not exist"),
    "rank twice": (lambda: hvd.add_process_set([0, 0]), "duplicate"),
    "empty set": (lambda: hvd.add_process_set([]), "at least one rank"),
    "set of words": (lambda: hvd.ProcessSet(["0"]), "integer ranks"),
    "init's sets": (lambda: hvd.init(process_sets=5), "process_sets"),
}  # fmt: skip


def wrong() -> dict[str, str]:
    told = {}
    for case, (call, _) in WRONG.items():
        try:
            call()
            told[case] = "no error"
        except ValueError as error:
            told[case] = str(error)
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return run_ranks(2, wrong)


@pytest.mark.parametrize("case", sorted(WRONG))
def test_wrong_call_is_a_value_error(told: list[dict[str, str]], case: str) -> None:
    assert all(WRONG[case][1] in one[case] for one in told), told[0][case]


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_a_wrong_operation_is_both_of_horovods_errors() -> None:
    """Errors that Horovod raises as HorovodInternalError or as ValueError; scripts catch either."""
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
        lambda: hvd.reducescatter(rows(4), op=hvd.Adasum),
        lambda: hvd.grouped_reducescatter([rows(4)], op=hvd.Adasum),
        lambda: hvd.alltoall(rows(9), [9, 9, 9]),
    ]
    found = []
    for call in calls:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        found.append(type(caught.value).__name__)
        assert isinstance(caught.value, ValueError)
    assert found == ["RequestError"] * 5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"])
@on_ranks()
def test_a_name_in_flight_is_refused(name: str) -> None:
    call = {
        "allreduce": lambda tensor: hvd.allreduce_async(tensor, name="twice"),
        "allgather": lambda tensor: hvd.allgather_async(tensor, name="twice"),
        "broadcast": lambda tensor: hvd.broadcast_async(tensor, 0, name="twice"),
        "alltoall": lambda tensor: hvd.alltoall_async(tensor, name="twice"),
        "reducescatter": lambda tensor: hvd.reducescatter_async(tensor, name="twice"),
    }[name]
    refused, handles = 0, []
    hvd.barrier()
    if hvd.rank() == 0:  # the others come when it has tried
        for _ in range(10):
            try:
                handles.append(call(rows(hvd.size())))
            except ValueError as error:
                assert "'twice' is still in flight" in str(error)
                refused += 1
    hvd.barrier()
    if hvd.rank():
        handles.append(call(rows(hvd.size())))
    results = [hvd.synchronize(handle) for handle in handles]
    assert (refused, len(results)) == (0 if hvd.rank() else 9, 1)


def handles() -> None:
    first = hvd.allreduce_async(rows(2))
    second = hvd.allreduce_async(rows(2))
    assert (type(first), second > first, {first, second} <= set(hvd.mpi_ops._handle_map)) == (int, True, True)
    hvd.synchronize(second)
    hvd.synchronize(first)
    assert first not in hvd.mpi_ops._handle_map
    assert hvd.synchronize(first) is None
    with pytest.raises(ValueError):
        hvd.poll(first)
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(rows(2))
    hvd.init()
    assert hvd.allreduce(rows(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_handles_are_numbers_that_are_used_once(ranks: int) -> None:
    run_ranks(ranks, handles)
