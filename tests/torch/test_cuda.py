"""The same on a GPU, which two ranks share; left out where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run_ranks

import horovod.torch as hvd

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.slow,
]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).to("cuda", torch.float64)


def inputs(step: int, rank: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5 + rank, 6, generator=source, dtype=torch.float64).to("cuda")


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor, scale: float) -> None:
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    (net(x).square().sum() * scale).backward()
    optimizer.step()


def together() -> list[torch.Tensor]:
    net = hvd.SyncBatchNorm.convert_sync_batchnorm(model())
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters()
    )
    for step in range(4):
        train(net, optimizer, step, inputs(step, hvd.rank()), 2 / 11)
    return [value.cpu() for value in net.state_dict().values()]


def test_training_equals_one_process_on_all_the_data() -> None:
    first, second = run_ranks(2, together)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        train(net, optimizer, step, torch.cat([inputs(step, rank) for rank in range(2)]), 1 / 11)
    for ours, theirs, alone in zip(first, second, net.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, alone.cpu(), rtol=0, atol=1e-10)
        assert torch.equal(ours, theirs)


def state(options: dict[str, bool]) -> list[tuple[str, str]]:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, **options)  # type: ignore[arg-type]
    if hvd.rank() == 0:
        net(inputs(0, 0)).sum().backward()
        optimizer.step()
    before = copy.deepcopy(net.state_dict())
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    return [
        (f"{name} on {value.device.type}", str(value.tolist()))
        for entry in optimizer.state_dict()["state"].values()
        for name, value in entry.items()
    ]


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=str)
def test_optimizer_state_goes_where_the_root_has_it(options: dict[str, bool]) -> None:
    first, second = run_ranks(2, state, options)
    assert first
    assert first == second


def scaled() -> tuple[float, list[float]]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2).to("cuda")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = net(torch.full((4, 3), float(hvd.rank() + 1), device="cuda")).sum()
        if step == 1 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), net.weight.flatten().tolist()


def test_grad_scaler_skips_the_same_steps() -> None:
    first, second = run_ranks(2, scaled)
    assert first == second
    assert first[0] == 32.0
