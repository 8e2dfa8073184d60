"""Weights in half precision: gradients, the optimizer's state and its step are float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import poptorch

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: poptorch.optim.SGD(p, lr=0.01, momentum=0.9, loss_scaling=128.0),
    "adam": lambda p: poptorch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: poptorch.optim.AdamW(p, lr=0.01, bias_correction=False),
    "rmsprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, use_tf_variant=True),
    "lamb": lambda p: poptorch.optim.LAMB(p, lr=0.01),
    "torch": lambda p: torch.optim.AdamW(p, lr=0.01),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return poptorch.identity_loss(self.layers(x).square().mean(), "mean")


def trained(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """Train on small inputs, whose gradients' squares are below the least number of half precision."""
    x = 0.01 * torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    model = poptorch.trainingModel(net, poptorch.Options().deviceIterations(1), optimizer)
    for _ in range(steps):
        model(x.to(next(net.parameters()).dtype))
    return [p.detach().float() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_in_half_precision_follow_those_in_float32(kind: str, dtype: torch.dtype) -> None:
    net, half = Net(), Net().to(dtype)
    memory = [p.data_ptr() for p in half.parameters()]
    optimizer = OPTIMIZERS[kind](half.parameters())
    expected = trained(net, OPTIMIZERS[kind](net.parameters()), 5)
    for found, value in zip(trained(half, optimizer, 5), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=2e-3 if dtype is torch.float16 else 2e-2)
    assert [p.data_ptr() for p in half.parameters()] == memory and {p.dtype for p in half.parameters()} == {dtype}
    assert {v.dtype for own in optimizer.state.values() for v in own.values()} == {torch.float32}


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "torch"])
def test_a_state_that_is_loaded_stays_float32(kind: str) -> None:
    net = Net().half()
    optimizer = OPTIMIZERS[kind](net.parameters())
    trained(net, optimizer, 3)
    other = copy.deepcopy(net)
    again = OPTIMIZERS[kind](other.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for found, value in zip(trained(other, again, 3), trained(net, optimizer, 3), strict=True):
        assert torch.equal(found, value)
