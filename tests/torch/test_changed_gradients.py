"""Gradients that are changed while the other ranks count on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import on_ranks, run_ranks
from torch_models import linear, rows, same_on_all_ranks, wrapped

import horovod.torch as hvd


class AsItIs:
    """A user's own compressor, which is shown every gradient by itself."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, _: None) -> torch.Tensor:
        return tensor


def changes_too_early(how: str, when: int, options: dict[str, Any]) -> str:
    net = linear()
    optimizer = wrapped(net, **options)
    for step in range(2):
        optimizer.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            net(rows(step)).square().sum().backward()
        if step == when and how == "clip":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        elif step == when and how == "data":
            net.bias.grad.data = net.bias.grad.data * 0.5  # type: ignore[union-attr]
        elif step == when:
            net.bias.grad = net.bias.grad * 0.5  # type: ignore[operator]
        try:
            optimizer.step()
        except RuntimeError as error:
            assert step == when
            # The ranks are in step still.
            hvd.barrier()
            return str(error)
    return ""


def test_moving_a_gradient_in_flight_to_other_memory_is_an_error() -> None:
    for text in run_ranks(2, changes_too_early, "data", 1, {}):
        assert "was changed after backward() had handed it to the other ranks (rank" in text


@pytest.mark.parametrize("how", ["zeros", "none", "channels last"])
@on_ranks(2, returns=[True, True])
def test_a_gradient_in_other_memory_is_reduced_in_the_next_step(how: str) -> bool:
    torch.manual_seed(hvd.rank())
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 1)).double()
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = wrapped(net)
    for step in range(4):
        if step == 2 and how == "channels last":
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer.zero_grad(set_to_none=how != "zeros")
        net(torch.rand(3, 2, 4, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.synchronize()
        for parameter in net.parameters() if how != "channels last" else ():
            parameter.grad.data = parameter.grad.data.clamp(-0.1, 0.1)  # type: ignore[union-attr]
        with optimizer.skip_synchronize():
            optimizer.step()
    return same_on_all_ranks(list(net.parameters()))


@on_ranks(2)
def test_a_model_that_changes_its_dtype_later_is_told_so() -> None:
    net = linear()
    optimizer = wrapped(net)
    net(rows()).sum().backward()
    optimizer.step()
    net.float()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"is float32, shape \(2,\), strides \(1,\) on cpu now, and was float64"):
        net(rows().float()).sum().backward()


@pytest.mark.parametrize("when", [0, 1], ids=lambda step: f"step {step}")
@pytest.mark.parametrize(
    "options",
    [{}, {"backward_passes_per_step": 2}, {"compression": AsItIs}, {"compression": hvd.Compression.fp16}],
    ids=["plain", "two passes", "own compressor", "fp16"],
)
def test_changing_a_gradient_that_others_count_on_is_an_error(options: dict[str, Any], when: int) -> None:
    for text in run_ranks(2, changes_too_early, "clip", when, options):
        assert "was changed after backward() had handed it to the other ranks (rank" in text
        assert "the gradient of " in text
        assert "optimizer.synchronize()" in text


@pytest.mark.parametrize("when", [0, 1], ids=lambda step: f"step {step}")
def test_replacing_a_gradient_that_others_count_on_is_an_error(when: int) -> None:
    texts = run_ranks(2, changes_too_early, "replace", when, {})
    assert all("the gradient of bias was changed" in text for text in texts)


@on_ranks(2)
def test_changing_a_sparse_gradient_that_others_count_on_is_an_error() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = wrapped(embedding)
    texts = []
    for step in range(3):
        embedding(torch.tensor([1, 2])).sum().backward()
        if step < 2:
            embedding.weight.grad.mul_(0.5)  # type: ignore[union-attr]
        try:
            optimizer.step()
        except RuntimeError as error:
            texts.append(str(error))
        optimizer.zero_grad()
    assert len(texts) == 2
    assert all("the gradient of weight was changed" in text for text in texts)


def lie_in_one_tensor() -> torch.Tensor:
    net = linear()
    flat = torch.zeros(8, dtype=torch.float64)
    net.weight.grad, net.bias.grad = flat[:6].view(2, 3), flat[6:]
    optimizer = wrapped(net)
    for step in range(3):
        if step == 2:
            # Gradients lie in the buckets of the one before.
            optimizer = wrapped(net)
        optimizer.zero_grad(set_to_none=False)
        net(rows(step)).square().mean().backward()
        optimizer.step()
    return net.weight.detach()


def test_gradients_that_are_parts_of_one_tensor_are_not_changed_by_each_other() -> None:
    first, second = run_ranks(2, lie_in_one_tensor)
    net = linear()
    for step in range(3):
        net.zero_grad()
        for rank in range(2):
            source = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 3, generator=source, dtype=torch.float64)
            (net(x).square().mean() / 2).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, net.weight.detach(), rtol=0, atol=1e-12)
