"""Uses of a DistributedOptimizer in training scripts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from harness import on_ranks, run_ranks
from torch_models import linear, rows, same_on_all_ranks, wrapped

import horovod.torch as hvd


def grads(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


@on_ranks(2, returns=[True] * 2)
def test_gradients_can_be_clipped_between_synchronize_and_step() -> bool:
    net = linear()
    optimizer = wrapped(net)
    for step in range(3):
        optimizer.zero_grad()
        net(rows(step)).square().sum().backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        assert norm > 0.01
        with optimizer.skip_synchronize():
            optimizer.step()
        assert sum(grad.square().sum() for grad in grads(net)) < 0.0101**2
    return same_on_all_ranks(list(net.parameters()))


@on_ranks(2, returns=[True] * 2)
def test_a_whole_training_may_run_where_steps_do_not_synchronize() -> bool:
    net = linear()
    optimizer = wrapped(net)
    with warnings.catch_warnings(), optimizer.skip_synchronize():
        warnings.simplefilter("error")
        optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does
        for step in range(3):
            net(rows(step)).square().sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
            net(rows(step)).square().sum().backward()
            optimizer.synchronize()
            optimizer.step()
            optimizer.zero_grad()
    return same_on_all_ranks(list(net.parameters()))


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_gradients_that_are_dropped_as_advised_earn_no_warning() -> None:
    net = linear()
    optimizer = wrapped(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            net(rows(step)).square().sum().backward()
            if step % 2:
                optimizer.synchronize()
                if step == 1:
                    net.zero_grad()
                else:
                    optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        net(rows(9)).square().sum().backward()
        optimizer.step()
    assert not [str(warning.message) for warning in caught]


@on_ranks(2, returns=[(1, 0, True)] * 2)
def test_step_after_synchronize_warns_once_and_does_not_reduce_twice() -> tuple[int, int, bool]:
    net = linear()
    optimizer = wrapped(net, op=hvd.Sum)
    net(rows()).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.synchronize()
        before = grads(net)
        optimizer.step()
    once = len(caught)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, grads(net), strict=True))
    net.zero_grad()
    net(rows()).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    return once, len(caught), unchanged


class Branches(torch.nn.Module):
    """Which layers work depends on the rank; ``never`` works nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.common, self.even, self.odd, self.never = (torch.nn.Linear(3, 3).double() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.even if hvd.rank() % 2 == 0 else self.odd
        return side(self.common(x))


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_gradients_missing_on_some_ranks_count_as_zeros_and_missing_on_all_stay_none(set_to_none: bool) -> None:
    net = Branches()
    optimizer = wrapped(net)
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        net(rows(step)).square().sum().backward()
        own = net.even if hvd.rank() == 0 else net.odd
        mine = own.weight.grad.clone()
        expected = hvd.allgather_object((hvd.rank() % 2, mine))
        optimizer.step()
        for side, grad in expected:
            reduced = (net.odd if side else net.even).weight.grad
            torch.testing.assert_close(reduced, grad / hvd.size(), rtol=0, atol=1e-14)
    assert same_on_all_ranks(list(net.parameters()))
    assert all(parameter.grad is None for parameter in net.never.parameters())


@on_ranks(3, returns=[True] * 3)
def test_a_layer_may_join_later_and_leave_again() -> bool:
    """A layer joins in the third step, on one rank only; then leaves again."""
    net = Branches()
    optimizer = wrapped(net)
    for step in range(6):
        optimizer.zero_grad()
        loss = net.common(rows(step)).square().sum()
        if step in (2, 3) and hvd.rank() == 1:
            loss = loss + net.never(rows(step)).square().sum()
        loss.backward()
        optimizer.step()
        assert (net.never.weight.grad is not None) == (step in (2, 3)), step
    return same_on_all_ranks(list(net.parameters()))


@on_ranks(2, returns=[[2.5, 2.5]] * 2)
def test_gradients_that_the_user_sets_are_reduced() -> list[float]:
    net = linear()
    optimizer = wrapped(net)
    for step in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, float(hvd.rank() + step))
        optimizer.step()
    return [float(parameter.grad.mean()) for parameter in net.parameters() if parameter.grad is not None]


@on_ranks(2, returns=[True] * 2)
def test_gradients_may_be_reset_in_every_way() -> bool:
    net = linear()
    optimizer = wrapped(net)
    for step in range(6):
        if step % 3 == 0:
            net.zero_grad(set_to_none=True)
        elif step % 3 == 1:
            net.zero_grad(set_to_none=False)
        else:
            net.weight.grad = None
            net.bias.grad = None
        net(rows(step)).square().sum().backward()
        alone = torch.autograd.grad(net(rows(step)).square().sum(), list(net.parameters()))
        optimizer.step()
        mean = [sum(part) / hvd.size() for part in zip(*hvd.allgather_object(alone), strict=True)]
        for reduced, wanted in zip(grads(net), mean, strict=True):
            torch.testing.assert_close(reduced, wanted, rtol=0, atol=1e-13)
    return same_on_all_ranks(list(net.parameters()))


@on_ranks(2, returns=[True] * 2)
def test_without_zero_grad_averages_add_up() -> bool:
    """No zero_grad: torch adds up, here the sum of averages."""
    net = linear()
    optimizer = wrapped(net, lr=0.0)
    total = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for step in range(3):
        loss = net(rows(step)).square().sum()
        alone = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()
        for i, parts in enumerate(zip(*hvd.allgather_object(alone), strict=True)):
            total[i] += sum(parts) / hvd.size()
            torch.testing.assert_close(list(net.parameters())[i].grad, total[i], rtol=0, atol=1e-13)
    return True


def closing(net: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1)
    search = "strong_wolfe" if kind == "lbfgs with line search" else None
    return torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn=search)


def with_closure(kind: str, op: int) -> tuple[torch.Tensor, float]:
    net = linear()
    optimizer = hvd.DistributedOptimizer(closing(net, kind), net.named_parameters(), op=op)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(rows()).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
    everything = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    assert same_on_all_ranks([everything])
    return everything, float(loss)


def closure_alone(kind: str, ranks: int, factor: int) -> torch.Tensor:
    net = linear()
    optimizer = closing(net, kind)
    sources = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    x = torch.cat([torch.randn(4, 3, generator=source, dtype=torch.float64) for source in sources])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(x).square().mean() * factor
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.mark.parametrize(
    ("kind", "op"),
    [("sgd", hvd.Average), ("lbfgs", hvd.Average), ("lbfgs", hvd.Sum), ("lbfgs with line search", hvd.Sum)],
)
def test_closures_see_reduced_gradients_and_their_loss(kind: str, op: int) -> None:
    results = run_ranks(2, with_closure, kind, op)
    alone = closure_alone(kind, 2, 2 if op == hvd.Sum else 1)
    for together, _ in results:
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("explicit", [True, False], ids=["synchronize first", "as for one process"])
@on_ranks(2)
def test_grad_scaler_skips_the_same_steps_on_all_ranks(explicit: bool) -> None:
    net = linear().float()
    optimizer = wrapped(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    start = net.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        loss = net(rows(step).float()).square().sum()
        if step == 2 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = net.weight.detach().clone()
        if explicit:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, net.weight) == (step == 2)
    assert same_on_all_ranks(list(net.parameters()))
    assert scaler.get_scale() == 512.0
    assert 0 < (net.weight - start).abs().max() < 100


@on_ranks(2, returns=[True] * 2)
def test_state_dict_makes_the_round_trip() -> bool:
    net = linear()
    plain = torch.optim.Adam(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        net(rows(step)).square().sum().backward()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["step"] == 2
    other = linear(5)
    other.load_state_dict(net.state_dict())
    again = hvd.DistributedOptimizer(torch.optim.Adam(other.parameters(), lr=9.0), other.named_parameters())
    again.load_state_dict(saved)
    for step in range(2, 4):
        for model, one in ((net, optimizer), (other, again)):
            one.zero_grad()
            model(rows(step)).square().sum().backward()
            one.step()
    return all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
