"""``host_optimizer``: every rank steps a share of the weights, and all get what a plain optimizer gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks

import horovod.torch as hvd
from horovod.errors import OptimizerUseError, RequestError

SMALL = {"HOROVOD_BUCKET_BYTES": "400"}


def net(seed: int = 0) -> torch.nn.Sequential:
    """Odd shapes, several buckets, an expression with strides of its own, float64."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    )
    return model.double().to(memory_format=torch.channels_last)


def batch(step: int, rank: int, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 2, 4, 4, generator=generator, dtype=torch.float64)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The biases have options of their own, as many scripts have it."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("weight")]},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.01},
    ]


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda g: torch.optim.SGD(g, lr=0.1),
    "momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda g: torch.optim.Adam(g, lr=0.02, weight_decay=0.01),
    "adamw": lambda g: torch.optim.AdamW(g, lr=0.02),
    "amsgrad": lambda g: torch.optim.AdamW(g, lr=0.02, amsgrad=True, maximize=True),
    "fused": lambda g: torch.optim.AdamW(g, lr=0.02, fused=True),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.02, momentum=0.9, centered=True),
    "others": lambda g: torch.optim.NAdam(g, lr=0.02),
    "asgd": lambda g: torch.optim.ASGD(g, lr=0.02),
    "rprop": lambda g: torch.optim.Rprop(g, lr=0.02),
}


def train_alone(kind: str, size: int, steps: int) -> tuple[torch.nn.Module, Any]:
    """Train one process with the batches of all ranks."""
    model = net()
    optimizer = KINDS[kind](groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(model(batch(step, rank)).sin().mean() for rank in range(size)) / size).backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        f"{number}.{key}": value
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def loaded(kind: str, state: dict[str, Any]) -> torch.optim.Optimizer:
    """A plain optimizer."""
    optimizer = KINDS[kind](groups(net()))
    optimizer.load_state_dict(state)
    return optimizer


class OnDevice(torch.nn.Parameter):
    """A weight that says that it lies on a device, so that its optimizer keeps a copy of it on the host."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]


def on_device(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, OnDevice(parameter.data))
    return model


@pytest.mark.parametrize(
    ("hosts", "kinds", "place"),
    [
        ((2,), list(KINDS), net), ((2,), ["nesterov", "adamw"], lambda: on_device(net())),
        ((3,), ["nesterov", "adamw"], net), ((2, 1), ["nesterov", "adamw"], net),
    ],
    ids=["2", "2 on a device", "3", "2 and 1"],
)  # fmt: skip
def test_every_kind_equals_torch(hosts: tuple[int, ...], kinds: list[str], place: Callable[[], Any]) -> None:
    size = sum(hosts)

    def train() -> Any:
        found = {}
        for kind in kinds:
            model = place()
            optimizer = hvd.DistributedOptimizer(
                KINDS[kind](groups(model)), model.named_parameters(), host_optimizer=True
            )
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for step in range(4):
                optimizer.zero_grad()
                model(batch(step, hvd.rank())).sin().mean().backward()
                optimizer.step()
                scheduler.step()
            held = sum(v.numel() for s in optimizer._inner.state.values() for v in s.values() if torch.is_tensor(v))
            found[kind] = (model.state_dict(), optimizer.state_dict(), held)
        return found

    results = run_ranks(size, train, env=SMALL, hosts=hosts if len(hosts) > 1 else ())
    for kind in kinds:
        model, optimizer = train_alone(kind, size, 4)
        for found in results:
            assert_close(dict(found[kind][0]), dict(model.state_dict()))
        wanted = state_of(loaded(kind, optimizer.state_dict()))
        assert_close(state_of(loaded(kind, results[0][kind][1])), wanted)
        whole = sum(v.numel() for v in wanted.values() if torch.is_tensor(v) and v.dim())
        steps = sum(1 for v in wanted.values() if torch.is_tensor(v) and not v.dim())
        held = [found[kind][2] for found in results]
        # Every element is on one rank; what is not an element, such as the number of steps, on each that has a part.
        assert whole <= sum(held) <= whole + size * steps
        assert max(held) <= whole / size + 40 * (whole > 0) + steps


def test_a_checkpoint_goes_on_with_another_number_of_ranks_and_with_plain_torch() -> None:
    def train(state: Any, start: int, stop: int, total: int) -> Any:
        model = net()
        optimizer = hvd.DistributedOptimizer(KINDS["amsgrad"](groups(model)), host_optimizer=True)
        if state is not None and hvd.rank() == 0:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(start, stop):
            optimizer.zero_grad()
            mine = range(hvd.rank(), total, hvd.size())
            losses = [model(batch(step, rank)).sin().mean() for rank in mine]
            (sum(losses) * hvd.size() / total).backward()
            optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, 0)
        return model.state_dict(), optimizer.state_dict()

    model = net()
    optimizer = KINDS["amsgrad"](groups(model))
    states: list[Any] = [None]
    for hosts, start, stop in [((1, 1), 0, 2), ((3,), 2, 3), ((2, 1), 3, 4), ((1,), 4, 5)]:
        results = run_ranks(
            sum(hosts), train, states[-1], start, stop, 6, env=SMALL, hosts=hosts if len(hosts) > 1 else ()
        )
        states.append(results[0])
        for step in range(start, stop):
            optimizer.zero_grad()
            (sum(model(batch(step, rank)).sin().mean() for rank in range(6)) / 6).backward()
            optimizer.step()
        for found, _ in results:
            assert_close(dict(found), dict(model.state_dict()))
        assert_close(state_of(loaded("amsgrad", results[0][1])), state_of(optimizer))
        # The others have their options only, and say so when somebody loads that.
        assert all(not state["state"] and state["state_is_on_rank"] == 0 for _, state in results[1:])


def test_clipping_accumulation_missing_frozen_and_tied() -> None:
    def model_of() -> torch.nn.Module:
        model = net()
        model.add_module("unused", torch.nn.Linear(2, 2).double())
        model.add_module("rare", torch.nn.Linear(3, 3).double())
        model[0].bias.requires_grad_(False)
        model.add_module("tied", torch.nn.Linear(12, 7, bias=False).double())
        model.tied.weight = model[2].weight  # type: ignore[union-attr]
        return model

    def loss(model: Any, step: int, rank: int, part: int) -> torch.Tensor:
        out = model[:2](batch(10 * step + part, rank))
        hidden = model[2](out) + model.tied(out)
        rare = model.rare(torch.ones(3, dtype=torch.float64)).sum() if step % 2 and rank == 0 else 0.0
        return (model[4](model[3](hidden)).sin() + rare).mean()

    def train() -> Any:
        model = model_of()
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), backward_passes_per_step=2, gradient_predivide_factor=2.0,
            host_optimizer=True,
        )  # fmt: skip
        norms = []
        for step in range(5):
            optimizer.zero_grad()
            for part in range(2):
                loss(model, step, hvd.rank(), part).backward()
            norms.append(float(optimizer.clip_grad_norm_(0.1, float("inf") if step == 3 else 2.0)))
            optimizer.clip_grad_value_(0.05)
            optimizer.step()
        return model.state_dict(), norms, optimizer.state_dict()

    results = run_ranks(2, train, env=SMALL)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        (sum(loss(model, step, rank, part) for rank in range(2) for part in range(2)) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, float("inf") if step == 3 else 2.0)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        for _, norms, _ in results:
            assert norms[step] == pytest.approx(float(norm), rel=1e-12)
    for found, _, _ in results:
        assert_close(dict(found), dict(model.state_dict()))
    # A parameter without a gradient has no state, and one with few gradients has taken fewer steps.
    assert_close(
        state_of(optimizer),
        {f"{n}.{k}": v for n, s in results[0][2]["state"].items() for k, v in s.items()},
    )


def test_process_sets_joins_new_parameters_and_dtypes() -> None:
    def train() -> Any:
        pair = hvd.add_process_set([0, 2])
        model = net()
        optimizer = hvd.DistributedOptimizer(KINDS["adam"](groups(model)), process_set=pair, host_optimizer=True)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step, hvd.rank())).sin().mean().backward()
            optimizer.step()
        alone = copy.deepcopy(dict(model.state_dict())), optimizer.state_dict()
        late = torch.nn.Linear(1, 4).float()
        with torch.no_grad():
            late.weight.fill_(1.0)
        optimizer.add_param_group({"params": list(late.parameters())})
        hvd.join()
        for step in range(2, 4):
            optimizer.zero_grad()
            late(model(batch(step, hvd.rank())).sin().float()).mean().backward()
            optimizer.step()
        return alone, dict(model.state_dict()), optimizer.state_dict()

    results = run_ranks(3, train, env={**SMALL, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    for ranks in [(0, 2), (1,)]:
        model = net()
        optimizer = KINDS["adam"](groups(model))
        late = torch.nn.Linear(1, 4)
        with torch.no_grad():
            late.weight.fill_(1.0)
        for step in range(4):
            optimizer.zero_grad()
            outs = [model(batch(step, rank)).sin() for rank in ranks]
            if step == 2:
                optimizer.add_param_group({"params": list(late.parameters())})
            sum((late(out.float()) if step >= 2 else out).mean() / len(ranks) for out in outs).backward()
            optimizer.step()
            if step == 1:
                for rank in ranks:
                    assert_close(results[rank][0][0], dict(model.state_dict()))
        for rank in ranks:
            torch.testing.assert_close(results[rank][1], dict(model.state_dict()), rtol=1e-6, atol=1e-7)
        state = results[ranks[0]][2]["state"]
        assert len(state) == 8
        assert all(float(entry["step"]) == (4 if number < 6 else 2) for number, entry in state.items())


def test_what_is_wrong_is_said_at_the_call() -> None:
    def raised(kind: type[Exception], function: Callable[[], Any]) -> str:
        with pytest.raises(kind) as caught:
            function()
        return str(caught.value)

    def use() -> list[str]:
        model = net()
        make = hvd.DistributedOptimizer
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        texts = [
            raised(RequestError, lambda: make(torch.optim.LBFGS(model.parameters()), host_optimizer=True)),
            raised(RequestError, lambda: make(torch.optim.Adafactor(model.parameters()), host_optimizer=True)),
            raised(RequestError, lambda: make(sgd, op=hvd.Min, host_optimizer=True)),
            raised(RequestError, lambda: make(sgd, host_optimizer="yes")),
        ]
        twin = torch.nn.Parameter(model[2].weight.detach()[:3])
        both = torch.optim.SGD([*model.parameters(), twin], lr=0.1)
        texts.append(raised(RequestError, lambda: make(both, host_optimizer=True)))
        optimizer = make(KINDS["momentum"](groups(model)), model.named_parameters(), host_optimizer=True)

        def backward() -> None:
            optimizer.zero_grad()
            model(batch(0, hvd.rank())).sum().backward()

        backward()
        optimizer.step()
        backward()
        texts.append(raised(OptimizerUseError, optimizer.state_dict))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        texts.append(raised(OptimizerUseError, optimizer.step))
        backward()
        optimizer.synchronize()
        model[2].weight.grad.mul_(2)
        with optimizer.skip_synchronize():
            texts.append(raised(OptimizerUseError, optimizer.step))
        backward()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        texts.append(raised(OptimizerUseError, lambda: scaler.step(optimizer)))
        state = optimizer_state(optimizer)
        texts.append(raised(OptimizerUseError, lambda: copy.deepcopy(optimizer)))
        if hvd.rank():
            texts.append(raised(RequestError, lambda: optimizer.load_state_dict(state)))
        return texts

    first, second = run_ranks(2, use, env=SMALL)
    wanted = [
        "Received: LBFGS", "Received: Adafactor", "Received: op=MIN", "Received: str", "share no memory",
        "state_dict() was called after loss.backward()", "optimizer.clip_grad_norm_", "has no effect",
        "GradScaler", "Call its state_dict() on every rank",
    ]  # fmt: skip
    assert all(want in found for found, want in zip(first, wanted, strict=True)), first
    assert "rank 0 alone got it" in second[-1]


def optimizer_state(optimizer: Any) -> Any:
    optimizer.step()
    return optimizer.state_dict()


def test_sparse_gradients() -> None:
    def train(as_dense: bool) -> Any:
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 3, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense, host_optimizer=True,
            compression=hvd.Compression.bf16,
        )  # fmt: skip
        table(torch.tensor([hvd.rank(), 5])).sum().backward()
        if not as_dense:
            with pytest.raises(RequestError, match="sparse_as_dense=True"):
                optimizer.step()
            return None
        before = table.weight.detach().clone()
        optimizer.step()
        return before - table.weight.detach()

    moved = torch.zeros(10, 3)
    moved[0], moved[1], moved[5] = 0.5, 0.5, 1.0
    for found in run_ranks(2, train, True):
        torch.testing.assert_close(found, moved)
    run_ranks(2, train, False)


def test_the_model_outlives_the_job_and_hooks_run_once() -> None:
    def train() -> Any:
        model = net()
        optimizer = hvd.DistributedOptimizer(KINDS["adamw"](groups(model)), host_optimizer=True)
        calls: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(0, hvd.rank())).square().mean()
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(3)]
        hvd.shutdown()
        return calls, losses, model(batch(0, 0)).detach()

    (calls, losses, out), (_, _, other) = run_ranks(2, train, env=SMALL)
    assert calls == ["pre", "post"] * 3
    assert losses[-1] < losses[0]
    assert torch.equal(out, other)
