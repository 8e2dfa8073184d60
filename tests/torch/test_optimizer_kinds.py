"""Gradients and models of unusual kinds: sparse, channels last, compiled, penalized, grouped, and Adasum's steps."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from harness import on_ranks, run_ranks
from torch_models import linear, rows, same_on_all_ranks, train, wrapped

import horovod.torch as hvd


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = torch.nn.Embedding(10, 3, sparse=True).double()
        self.out = torch.nn.Linear(3, 1).double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words)).sum()


def with_sparse(as_dense: bool) -> tuple[bool, list[bool], torch.Tensor]:
    net = Words()
    optimizer = wrapped(net, sparse_as_dense=as_dense)
    layouts = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 2 and hvd.rank() == 1:
            loss = net.out(torch.ones(3, dtype=torch.float64)).sum()
        else:
            loss = net(torch.tensor([hvd.rank(), step, step]))
        loss.backward()
        optimizer.step()
        layouts.append(net.table.weight.grad.is_sparse)
    return same_on_all_ranks(net.parameters()), layouts, net.table.weight.detach()


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_combined(as_dense: bool) -> None:
    results = run_ranks(2, with_sparse, as_dense)
    assert all(same and layouts == [True] * 4 for same, layouts, _ in results)

    alone = Words()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            if step == 2 and rank == 1:
                loss = alone.out(torch.ones(3, dtype=torch.float64)).sum()
            else:
                loss = alone(torch.tensor([rank, step, step]))
            (loss / 2).backward()
        optimizer.step()
    torch.testing.assert_close(results[0][2], alone.table.weight.detach(), rtol=0, atol=1e-12)


@on_ranks(2, returns=[(True, True, True)] * 2)
def test_gradients_keep_the_memory_layout_of_their_parameters() -> tuple[bool, bool, bool]:
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    optimizer = wrapped(net)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    grad = net.weight.grad
    dense = grad.is_contiguous(memory_format=torch.channels_last)
    return same_on_all_ranks(net.parameters()), dense, grad._base is not None


@pytest.mark.filterwarnings("ignore:Using backward")
@on_ranks(2, returns=[True] * 2)
def test_gradient_penalties_work() -> bool:
    net = linear()
    optimizer = wrapped(net)
    for step in range(3):
        optimizer.zero_grad()
        x = rows(step).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        (net(x).sum() + slope.square().sum()).backward(create_graph=step == 1)
        optimizer.step()
        assert not net.weight.grad.requires_grad  # type: ignore[union-attr]
    return same_on_all_ranks(net.parameters())


@pytest.mark.slow
@on_ranks(2, returns=[(True, [])] * 2)
def test_compiled_models_train_the_same() -> tuple[bool, list[str]]:
    warned: list[str] = []
    net = torch.nn.Sequential(linear(), hvd.SyncBatchNorm(2).double())
    hvd.broadcast_parameters(net.state_dict(), 0)
    plain = copy.deepcopy(net)
    optimizers = [wrapped(net), wrapped(plain)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model, optimizer in zip((torch.compile(net, backend="aot_eager"), plain), optimizers, strict=True):
            train(model, optimizer, 3)
    warned += [str(warning.message) for warning in caught]
    close = all(
        torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(net.parameters(), plain.parameters(), strict=True)
    )
    return close and same_on_all_ranks(net.parameters()), [text for text in warned if "horovod" in text]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs torch 2.10")
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@on_ranks(2)
def test_gradients_may_have_more_digits_than_their_parameters(compression: Any) -> None:
    net = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    torch.nn.init.ones_(net.weight)
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters(), compression=compression
    )
    for step in range(3):
        optimizer.zero_grad()
        # An average that bfloat16 cannot hold; one rank has no gradient of the bias in the last step.
        wanted = 1.0 + 2.0**-9 + step
        if hvd.rank() or step < 2:
            net.bias.grad = torch.full((2,), wanted)
        net.weight.grad = torch.full((2, 3), wanted + (2.0**-8 if hvd.rank() else -(2.0**-8)))
        optimizer.step()
        assert torch.equal(net.weight.grad, torch.full((2, 3), wanted))
        assert torch.equal(net.bias.grad, torch.full((2,), wanted / (1 + step // 2)))


@on_ranks(2)
def test_a_copy_of_one_with_adasum_is_a_plain_optimizer() -> None:
    net = linear()
    other = copy.deepcopy(wrapped(net, op=hvd.Adasum))
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, float(hvd.rank()))
    other.step()
    moved = [float((b - a).max()) for a, b in zip(net.parameters(), other.param_groups[0]["params"], strict=True)]
    assert moved == pytest.approx([-0.1 * hvd.rank()] * 2)


@pytest.mark.parametrize(
    ("groups", "buckets"),
    [
        (None, [{"0.weight", "0.bias", "1.weight", "1.bias", "2.weight"}]),
        ([[4, 0], [1]], [{"0.weight", "2.weight"}, {"0.bias"}, {"1.weight", "1.bias"}]),
        (2, [{"0.weight", "0.bias", "1.weight"}, {"1.bias", "2.weight"}]),
    ],
    ids=["one bucket", "listed", "two buckets"],
)
@on_ranks(2)
def test_groups_are_the_buckets_and_memory_is_that_of_the_gradients(groups: Any, buckets: list[set[str]]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8, bias=False))
    parameters = list(net.parameters())
    if isinstance(groups, list):
        groups = [[parameters[index] for index in group] for group in groups]
    optimizer = wrapped(net, groups=groups)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    made = {slot.bucket for slot in optimizer._reducer.slots.values()}
    held = sum(parameter.grad.untyped_storage().nbytes() for parameter in {b.slots[0].parameter for b in made})
    wanted = sum(parameter.nbytes for parameter in parameters)
    assert {frozenset(slot.name for slot in bucket.slots) for bucket in made} == {frozenset(names) for names in buckets}
    assert held / wanted < 1.05
