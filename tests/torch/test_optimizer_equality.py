"""N ranks train as one process does on the concatenated batch, and all ranks stay the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import on_ranks, run_ranks

import horovod.torch as hvd

STEPS, ROWS = 5, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Conv1d(2, 3, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(12, 5), torch.nn.Linear(5, 3)
    ).double()


def batch(step: int, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + 100 * number + rank)
    return (
        torch.randn(ROWS, 2, 6, generator=source, dtype=torch.float64),
        torch.randn(ROWS, 3, generator=source, dtype=torch.float64),
    )


def flat(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def train_alone(name: str, ranks: int, passes: int) -> list[torch.Tensor]:
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            parts = [batch(step, number, rank) for rank in range(ranks)]
            x, y = (torch.cat(part) for part in zip(*parts, strict=True))
            torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        history.append(flat(net))
    return history


def train_together(name: str, passes: int, options: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Return the parameters after each step, and the number of buckets."""
    net = model()
    if isinstance(options.get("groups"), list):
        parameters = list(net.parameters())
        options = {**options, "groups": [[parameters[i] for i in group] for group in options["groups"]]}
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](net.parameters()), net.named_parameters(), backward_passes_per_step=passes, **options
    )
    history = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for number in range(passes):
            x, y = batch(step, number, hvd.rank())
            torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        history.append(flat(net))
    return history, len({id(slot.bucket) for slot in optimizer._reducer.slots.values()})


def check(ranks: int, name: str, passes: int, env: dict[str, str] | None = None, **options: Any) -> int:
    """Compare ranks with one process, and return the number of their buckets."""
    alone = train_alone(name, ranks, passes)
    together, buckets = zip(*run_ranks(ranks, train_together, name, passes, options, env=env), strict=True)
    for step in range(STEPS):
        torch.testing.assert_close(together[0][step], alone[step], rtol=0, atol=1e-12)
        assert all(torch.equal(other[step], together[0][step]) for other in together[1:])
    return buckets[0]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_equals_one_process_on_all_the_data(name: str, passes: int) -> None:
    check(3, name, passes)


@pytest.mark.quick
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": [[0, 3], [1, 2, 5]]},
        {"groups": [[5]], "gradient_predivide_factor": 0.5},
    ],
    ids=str,
)
def test_equals_one_process_whatever_travels_together(options: dict[str, Any]) -> None:
    check(2, "momentum", 2, **options)


def test_equals_one_process_with_many_small_buckets() -> None:
    assert check(2, "adam", 1, env={"HOROVOD_BUCKET_BYTES": "128"}) > 3


def with_compression(kind: str) -> tuple[torch.Tensor, torch.dtype]:
    torch.manual_seed(3)
    net = torch.nn.Linear(40, 30)
    compression: Any = {"fp16": hvd.Compression.fp16, "bf16": hvd.Compression.bf16, "own": Halving}[kind]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), compression=compression
    )
    for step in range(3):
        optimizer.zero_grad()
        (net(torch.full((2, 40), 0.5 * (hvd.rank() + step))) * 0.1).sum().backward()
        optimizer.step()
    return net.weight.detach(), net.weight.grad.dtype


class Halving:
    """A user's compressor; on the wire everything is half as large."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
        return tensor / 2, 2.0

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: float) -> torch.Tensor:
        return tensor * ctx


@pytest.mark.parametrize("kind", ["fp16", "bf16", "own"])
def test_compressed_gradients_keep_ranks_equal_and_are_close(kind: str) -> None:
    torch.manual_seed(3)
    start = torch.nn.Linear(40, 30).weight.detach()
    (first, dtype), (second, _) = run_ranks(2, with_compression, kind)
    assert torch.equal(first, second)
    assert dtype is torch.float32
    # The mean gradient is 0.1 * 2 * 0.5 * (0.5 + step).
    expected = start - sum(0.1 * (0.5 + step) for step in range(3))
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-6 if kind == "own" else 3e-3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("op", "moved"), [(hvd.Sum, 12.0), (hvd.Average, 4.0), (hvd.Min, 2.0), (hvd.Max, 6.0), (hvd.Product, 12.0)]
)
@on_ranks(3)
def test_gradients_are_combined_by_the_op(op: int, moved: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=op)
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    assert -float(parameter.detach()) == moved
