"""Where a DistributedOptimizer ends: too many passes, other parameters, other sets, sparse gradients, a new job."""

from __future__ import annotations

import gc
from collections import OrderedDict

import pytest
import torch
from harness import on_ranks, run_ranks
from heard import heard
from torch_models import linear, rows, same_on_all_ranks, train, wrapped

import horovod.torch as hvd
from horovod.errors import MismatchError


@on_ranks(2)
def test_more_backward_passes_than_announced_are_an_error() -> None:
    net = linear()
    optimizer = wrapped(net, backward_passes_per_step=2)
    train(net, optimizer)
    for _ in range(2):
        net(rows()).sum().backward()
    with pytest.raises(AssertionError, match="came 3 times") as caught:
        net(rows()).sum().backward()
    text = str(caught.value)
    assert "backward_passes_per_step is 2" in text
    assert "Call optimizer.step() after every 2 backward passes; or" in text


@on_ranks(2, returns=[[-10.5, -10.5]] * 2)
def test_a_step_may_come_after_fewer_passes() -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), backward_passes_per_step=3)
    for passes in (3, 1, 2):
        optimizer.zero_grad()
        for _ in range(passes):
            (parameter * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    (parameter * (hvd.rank() + 1)).sum().backward()
    assert optimizer._handles
    optimizer.step()
    return parameter.tolist()


@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2)
def test_zero_grad_before_the_step_is_an_error(steps: int) -> None:
    net = linear()
    optimizer = wrapped(net)
    train(net, optimizer, steps)
    net(rows()).sum().backward()
    with pytest.raises(AssertionError, match=r"optimizer\.zero_grad\(\) was called") as caught:
        optimizer.zero_grad()
    optimizer.step()
    assert f"(rank {hvd.rank()}, at {__file__}:" in str(caught.value)


@on_ranks(2, returns=[True] * 2)
def test_after_the_job_nobody_counts_on_gradients() -> bool:
    net = linear()
    optimizer = wrapped(net)
    train(net, optimizer)
    net(rows()).sum().backward()
    hvd.shutdown()
    optimizer.zero_grad()
    return net.weight.grad is None


@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2)
def test_a_step_with_gradients_of_one_rank_is_an_error(steps: int) -> None:
    net = linear()
    optimizer = wrapped(net)
    train(net, optimizer, steps)
    net(rows()).sum().backward()
    with optimizer.skip_synchronize():
        with pytest.raises(AssertionError) as caught:
            optimizer.step()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert "inside optimizer.skip_synchronize() with gradients of this rank alone" in str(caught.value)
    assert f"(rank {hvd.rank()}, at {__file__}:" in str(caught.value)
    assert "Call optimizer.synchronize() after loss.backward()" in str(caught.value)
    assert same_on_all_ranks(net.parameters())


@on_ranks(2, returns=[True] * 2)
def test_parameters_may_be_added_and_unfrozen() -> bool:
    net, more, frozen = linear(), linear(1), linear(2)
    frozen.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*net.parameters(), *frozen.parameters()], lr=0.1), backward_passes_per_step=1
    )
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.2})
        if step == 4:
            frozen.requires_grad_(True)
        optimizer.zero_grad()
        loss = net(rows(step)).square().sum() + more(rows(step)).square().sum() + frozen(rows(step)).square().sum()
        loss.backward()
        optimizer.step()
        if step < 2:
            more.zero_grad()
    start = linear(2)
    assert not torch.equal(frozen.weight, start.weight)
    return all(same_on_all_ranks(model.parameters()) for model in (net, more, frozen))


@on_ranks(2, returns=[True] * 2)
def test_layers_may_be_frozen_for_a_while() -> bool:
    net = torch.nn.Sequential(linear(), torch.nn.Linear(2, 2).double())
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = wrapped(net)
    for step in range(4):
        net[0].requires_grad_(step % 2 == 0)
        before = net[0].weight.detach().clone()
        optimizer.zero_grad()
        net(rows(step)).square().sum().backward()
        optimizer.step()
        assert torch.equal(before, net[0].weight) == (step % 2 == 1)
    return same_on_all_ranks(net.parameters())


@on_ranks(2, returns=[True] * 2)
def test_training_goes_on_after_shutdown_and_init() -> bool:
    net = linear()
    optimizer = wrapped(net)
    train(net, optimizer)
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
        train(net, optimizer, 3)
    return same_on_all_ranks(net.parameters())


@on_ranks(2, returns=[True] * 2)
def test_two_optimizers_do_not_meet() -> bool:
    nets = [linear(), linear(1)]
    plain = [hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    for step in range(3):
        for net, optimizer in zip(nets, plain, strict=True):
            optimizer.zero_grad()
            net(rows(step)).square().sum().backward()
        # Both are in flight now; the order of the steps may differ between ranks once buckets are agreed on.
        order = [0, 1] if step == 0 or hvd.rank() == 0 else [1, 0]
        for index in order:
            plain[index].step()
    return all(same_on_all_ranks(net.parameters()) for net in nets)


@on_ranks(2)
def test_the_newest_optimizer_of_a_model_counts_and_hooks_go_with_it() -> None:
    net = linear()
    for _ in range(3):
        optimizer = wrapped(net)
        train(net, optimizer)
    newer = wrapped(net)
    train(net, newer)
    try:
        optimizer.step()
    except RuntimeError as error:
        text = str(error)
    del optimizer, newer
    gc.collect()
    assert not net.weight._post_accumulate_grad_hooks
    assert same_on_all_ranks(net.parameters())
    assert "was taken over by another DistributedOptimizer at " in text
    assert text.count(".py:") == 2


@on_ranks(3, returns=[([-3.0], [-3.0]), ([-3.0], [-3.0]), ([-3.0], [-3.0])])
def test_a_process_set_trains_by_itself() -> tuple[list[float], list[float]]:
    pair = hvd.add_process_set([0, 2])
    parameter, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=pair)
    everybody = hvd.DistributedOptimizer(torch.optim.SGD([other], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        everybody.zero_grad()
        ((parameter + other) * float(hvd.rank())).sum().backward()
        optimizer.step()
        everybody.step()
    return parameter.tolist(), other.tolist()


@on_ranks(2)
def test_an_unregistered_process_set_is_refused() -> None:
    with pytest.raises(ValueError, match="is not registered"):
        wrapped(linear(), process_set=hvd.ProcessSet([0, 1]))


@on_ranks(3)
def test_different_models_are_an_error_on_every_rank() -> None:
    odd, said = hvd.rank() % 2, []
    for kind in ("shape", "count", "name"):
        net = torch.nn.Sequential(linear(), torch.nn.Linear(2, 2 + odd * (kind == "shape"), bias=odd == 0).double())
        if kind == "name":
            net = torch.nn.Sequential(OrderedDict({"a" + "b" * odd: linear()}))
        with pytest.raises(MismatchError, match="DistributedOptimizer needs the same names on every rank") as caught:
            train(net, wrapped(net), 1)
        said.append(str(caught.value))
    shape, count, name = said
    assert "\n  only ranks 0, 2 have: 3. 1.weight, float64, shape (2, 2), strides (2, 1), 4. 1.bias, " in shape
    assert "\n  only rank 1 has: 3. 1.weight, float64, shape (3, 2), strides (2, 1)\n" in shape
    assert "rank 0: 4, rank 1: 3, rank 2: 4\n" in count
    assert "\n  only ranks 0, 2 have: 4. 1.bias, float64, shape (2,), strides (1,)\nDtypes" in count
    assert "\n  only ranks 0, 2 have: 1. a.weight, float64, shape (2, 3), strides (3, 1), 2. a.bias" in name
    assert "\n  only rank 1 has: 1. ab.weight, " in name


def begins_somewhere(kind: str) -> list[str]:
    torch.manual_seed(0 if kind == "equal" else hvd.rank())
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(3, 1), torch.nn.PReLU(2))
    net = net.to({"half": torch.bfloat16, "complex": torch.complex64}.get(kind, torch.float32))
    net[0].to(memory_format=torch.channels_last)
    parameters = list(net[:3].named_parameters())
    if kind == "broadcast":
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), list(net.named_parameters()))
    with heard() as said:
        for _ in range(3):
            optimizer.zero_grad()
            # The last layer never works: what the ranks have not agreed on is asked about in every step.
            net[:3](torch.ones(1, 2, 3, 3, dtype=parameters[0][1].dtype)).abs().sum().backward()
            optimizer.step()
    return said


@pytest.mark.parametrize("kind", ["float", "half", "complex", "broadcast", "equal"])
def test_a_forgotten_broadcast_is_a_warning(kind: str) -> None:
    first, second = run_ranks(2, begins_somewhere, kind)
    assert second == []
    if kind in ("broadcast", "equal"):
        assert first == []
        return
    [warning] = first
    assert "the ranks train different models: 0.weight, 0.bias, 2.weight and 1 more" in warning
    assert "on rank 1. Call hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in warning
