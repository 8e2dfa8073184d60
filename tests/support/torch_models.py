"""A small model, its optimizer and its data, for tests of ``horovod.torch`` on several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import horovod.torch as hvd


def linear(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2).double()


def wrapped(net: torch.nn.Module, lr: float = 0.1, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=lr), net.named_parameters(), **options)


def rows(step: int = 0) -> torch.Tensor:
    """Return this rank's batch of a step."""
    source = torch.Generator().manual_seed(10 * step + hvd.rank())
    return torch.randn(4, 3, generator=source, dtype=torch.float64)


def train(net: torch.nn.Module, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(rows(step)).square().sum().backward()
        optimizer.step()


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    everywhere = hvd.allgather_object([tensor.tolist() for tensor in tensors])
    return all(other == everywhere[0] for other in everywhere)
