"""Training as Horovod's own examples and tests do it."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import on_ranks

import horovod.torch as hvd


def net(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).double()


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def same_everywhere(model: torch.nn.Module) -> bool:
    everywhere = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
    return all(one == everywhere[0] for one in everywhere)


@on_ranks(2, returns=[True] * 2)
def test_sparse_adam() -> bool:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0, model=model)
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(3):
        distributed.zero_grad()
        model(torch.tensor([hvd.rank(), step])).sum().backward()
        distributed.step()
    return same_everywhere(model)


def adasum_of(vectors: list[torch.Tensor]) -> torch.Tensor:
    """The published formula, pair by pair."""
    while len(vectors) > 1:
        merged = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=False):
            dot, aa, bb = float(a @ b), float(a @ a), float(b @ b)
            merged.append((1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b)
        if len(vectors) % 2:
            merged.append(vectors[-1])
        vectors = merged
    return vectors[0]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("ranks", "of_set"), [(2, False), (3, False), (4, False), (3, True)], ids=str)
@on_ranks()
def test_adasum_combines_steps_by_the_published_formula(passes: int, of_set: bool) -> None:
    """The largest difference between the optimizer and one process that does the same in float64."""
    ranks = [0, 1] if of_set else list(range(hvd.size()))
    chosen = hvd.add_process_set(ranks) if of_set else hvd.global_process_set
    model, worst = net(), 0.0
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(), op=hvd.Adasum,
        backward_passes_per_step=passes, process_set=chosen,
    )  # fmt: skip
    replicas = [net() for _ in ranks]
    locals_ = [torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9) for replica in replicas]

    def backward(one: torch.nn.Module, rank: int, step: int) -> None:
        for number in range(passes):
            one(batch(rank, 10 * step + number)).square().mean().backward()

    for step in range(3):
        if chosen.included():
            optimizer.zero_grad()
            backward(model, hvd.rank(), step)
            optimizer.synchronize()
            optimizer.step()
        starts = [[p.detach().clone() for p in replica.parameters()] for replica in replicas]
        for rank, replica, local in zip(ranks, replicas, locals_, strict=True):
            local.zero_grad()
            backward(replica, rank, step)
            local.step()
        for index in range(len(starts[0])):
            copies = [list(replica.parameters())[index].data for replica in replicas]
            deltas = [(copy - start[index]).flatten() for copy, start in zip(copies, starts, strict=True)]
            moved = starts[0][index] + adasum_of(deltas).view_as(copies[0])
            for copy in copies:
                copy.copy_(moved)
            if chosen.included():
                worst = max(worst, float((list(model.parameters())[index] - moved).abs().max()))
    with pytest.raises(AssertionError, match="Adasum"):
        optimizer.skip_synchronize()
    hvd.barrier()
    assert worst < 1e-10


@pytest.mark.slow
@on_ranks(2, returns=[[], []])
def test_collectives_inside_a_compiled_function() -> list[str]:
    """A collective in the middle of a compiled function, and no optimizer that could have told the compiler."""
    import torch._dynamo  # as any optimizer does

    hvd.init()

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x * 2, op=hvd.Sum, name="inside") + 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.ones(3, requires_grad=True)
        for _ in range(2):
            y = function(x)
            y.sum().backward()
    assert y.tolist() == [1 + 2 * hvd.size()] * 3
    assert x.grad.tolist() == [4.0 * hvd.size()] * 3
    return [str(warning.message) for warning in caught if "horovod" in str(warning.message)]


@on_ranks(2, returns=[[0.5, 0.5]] * 2)
def test_a_gradient_is_reduced_by_itself_for_whoever_knows_optimizers_by_that() -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=hvd.Compression.fp16)
    parameter.grad = torch.full((2,), float(hvd.rank()))
    handle, ctx = optimizer._allreduce_grad_async(parameter)
    return hvd.Compression.fp16.decompress(hvd.synchronize(handle), ctx).tolist()
