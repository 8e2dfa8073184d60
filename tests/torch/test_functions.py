"""Parameters, optimizer state and Python objects of all ranks become the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import on_ranks, run_ranks

import horovod.torch as hvd
from horovod.errors import MismatchError, RequestError


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
    return layers.to(memory_format=torch.channels_last)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["state_dict", "named", "named with none", "tensors"])
@on_ranks(3)
def test_parameters_become_those_of_the_root(kind: str) -> None:
    model = net(hvd.rank())
    entries: dict[str, Any] = {
        "state_dict": model.state_dict(),
        "named": model.named_parameters(),
        "named with none": [*model.named_parameters(), ("nothing", None)],
        "tensors": list(model.parameters()),
    }
    hvd.broadcast_parameters(entries[kind], root_rank=1)
    wanted = list(net(1).parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))


def different_parameters(named: bool) -> str:
    rank = hvd.rank()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), *([torch.nn.Linear(2, 1)] * (rank == 1)))
    params: Any = dict(model.named_parameters())
    if rank == 2:
        del params["0.bias"]
    with pytest.raises(MismatchError) as caught:
        hvd.broadcast_parameters(params if named else list(params.values()), 0)
    # The ranks are in step still.
    assert hvd.allgather_object(rank) == [0, 1, 2]
    return str(caught.value)


def test_different_sets_of_parameters_are_an_error_on_every_rank() -> None:
    for text in run_ranks(3, different_parameters, True):
        assert "Received rank 0: 2, rank 1: 4, rank 2: 1" in text
        assert "\n  only rank 1 has: 1.bias, 1.weight" in text
        assert "\n  only ranks 0, 1 have: 0.bias\n" in text
        assert "test_functions.py:" in text
    for text in run_ranks(3, different_parameters, False):
        assert "\n  only rank 1 has: tensor 2, tensor 3" in text


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (torch.zeros(3), "Received: Tensor"),
        (5, "Received: int"),
        (torch.nn.Sequential(), "Received: Sequential; pass its state_dict"),
        ([("a", 5)], "'a': int"),
        ([("a", 5, 6)], "tuple of 3"),
        ({"a": "text"}, "'a': str"),
    ],
    ids=str,
)
def test_what_is_no_tensor_is_refused(params: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        hvd.broadcast_parameters(params, 0)
    assert f"(at {__file__}:" in str(caught.value)


class Counting(torch.optim.Optimizer):
    """A user's optimizer with state of several kinds, also under a key that is not a parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "history": [1, 2.5, "x"]})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("sums", [torch.zeros_like(parameter), {"deep": torch.ones(2)}])[0].add_(parameter.grad)
        self.state["total"] = {"steps": torch.tensor(7 + hvd.rank())}  # type: ignore[index]


OPTIMIZERS: dict[str, Callable[[Any, int], torch.optim.Optimizer]] = {
    "sgd": lambda p, rank: torch.optim.SGD(p, lr=0.1 * (rank + 1)),
    "momentum": lambda p, rank: torch.optim.SGD(p, lr=0.1, momentum=0.9 - 0.1 * rank, weight_decay=0.5),
    "adam": lambda p, rank: torch.optim.Adam(p, lr=0.1 * (rank + 1), betas=(0.5, 0.6 + 0.1 * rank), weight_decay=0.5),
    "adamw amsgrad": lambda p, rank: torch.optim.AdamW(p, lr=0.1, amsgrad=True, eps=1e-8 * (rank + 1)),
    "tensor lr": lambda p, rank: torch.optim.Adam(p, lr=torch.tensor(0.1 * (rank + 1))),
    "rmsprop": lambda p, rank: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adadelta": lambda p, rank: torch.optim.Adadelta(p, rho=0.9 - 0.1 * rank),
    "custom": lambda p, rank: Counting(p),
}
#: The others of torch; LBFGS is refused, SparseAdam wants sparse gradients, Muon takes matrices only.
OTHERS = {
    cls.__name__: cls
    for cls in torch.optim.Optimizer.__subclasses__()
    if cls.__module__.startswith("torch.optim") and cls.__name__ not in ("LBFGS", "SparseAdam", "Muon")
}


def plain(value: Any) -> Any:
    """State as data that compares, types of options included."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.stride()), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return (type(value).__name__, value)


def optimizer_state(name: str, who: list[int], distributed: bool) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    if name in OTHERS:
        optimizer: Any = OTHERS[name](model.parameters(), lr=0.1 * (hvd.rank() + 1))  # type: ignore[call-arg]
    else:
        optimizer = OPTIMIZERS[name](model.parameters(), hvd.rank())
    if hvd.rank() in who:
        for _ in range(hvd.rank() + 1):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    model.zero_grad()
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    return plain(optimizer.state_dict())


def optimizer_states(cases: list[tuple[str, list[int]]]) -> dict[str, Any]:
    return {f"{name}, state on {who}": optimizer_state(name, who, name == "momentum") for name, who in cases}


@pytest.mark.parametrize("name", [*sorted(OPTIMIZERS), "others"])
def test_optimizer_state_becomes_that_of_the_root_without_a_step(name: str) -> None:
    cases: list[tuple[str, list[int]]] = [(name, who) for who in ([0], [1], [0, 1], [])]
    if name == "others":
        cases = [(other, [0]) for other in OTHERS]
    first, second = run_ranks(2, optimizer_states, cases)
    assert first == second
    assert [bool(state["state"]) for state in first.values()] == [
        0 in who and name not in ("sgd", "SGD") for name, who in cases
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_missing_gradients_become_zeros_before_the_first_step() -> None:
    """The state of an optimizer without a step, after ``broadcast_optimizer_state``."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    model[2].bias.requires_grad_(False)
    model[2].weight.grad = torch.full((1, 2), 7.0)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0, model=model)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not optimizer.state
    assert model[0].weight.grad.layout is torch.sparse_coo
    assert torch.equal(hvd.broadcast(model[1].weight.grad, 0), torch.zeros(2, 3))
    assert model[2].bias.grad is None
    assert model[2].weight.grad.tolist() == [[7.0, 7.0]]
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    adam = torch.optim.SparseAdam(list(embedding.parameters()))
    hvd.broadcast_optimizer_state(adam, 0)
    embedding(torch.tensor([1])).sum().backward()  # with no zero_grad before it
    adam.step()
    hvd.broadcast_optimizer_state(adam, 0)
    adam.zero_grad()
    hvd.broadcast_optimizer_state(adam, 0)
    assert embedding.weight.grad is None  # only where there was no state


@on_ranks(2, returns=[True] * 2)
def test_tensors_that_fit_are_overwritten_in_place() -> bool:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1 * (hvd.rank() + 1)))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    rate, average = optimizer.param_groups[0]["lr"], optimizer.state[model.weight]["exp_avg"]
    hvd.broadcast_optimizer_state(optimizer, 0)
    return rate is optimizer.param_groups[0]["lr"] and average is optimizer.state[model.weight]["exp_avg"]


@on_ranks(2)
def test_other_groups_are_an_error_on_every_rank() -> None:
    said = []
    for kind in ("groups", "shape", "class", "LBFGS"):
        parameters = [torch.nn.Parameter(torch.zeros(2 + hvd.rank() * (kind == "shape"))) for _ in range(2)]
        groups: list[Any] = [{"params": [parameter]} for parameter in parameters]
        if kind == "LBFGS" or (kind == "groups" and hvd.rank() == 1):
            groups = parameters if kind == "LBFGS" else [{"params": parameters}]
        other = {"class": torch.optim.Adam, "LBFGS": torch.optim.LBFGS}.get(kind, torch.optim.SGD)
        with pytest.raises(ValueError, match="rank 1: ") as caught:
            hvd.broadcast_optimizer_state((other if hvd.rank() else torch.optim.SGD)(groups, lr=0.1), 0)
        said.append(str(caught.value))
    groups, shape, kind, lbfgs = said
    assert "1 parameter groups, not 2" in groups and "shape [3] of param" in shape
    assert "rank 1: Adam, not SGD" in kind and "rank 1: LBFGS, not SGD" in lbfgs


@pytest.mark.parametrize(
    ("given", "text"),
    [({}, "Received: dict; pass the optimizer itself, not its state_dict()"), (None, "Received: NoneType")],
)
def test_what_is_no_optimizer_is_an_error_at_the_call(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match="broadcast_optimizer_state needs an optimizer") as caught:
        hvd.broadcast_optimizer_state(given, 0)
    assert text in str(caught.value)


@on_ranks(2)
def test_lbfgs_is_refused_on_every_rank() -> None:
    kind = torch.optim.LBFGS if hvd.rank() == 0 else torch.optim.SGD
    with pytest.raises(ValueError, match="LBFGS cannot be broadcast"):
        hvd.broadcast_optimizer_state(kind([torch.nn.Parameter(torch.zeros(1))]), 0)
    hvd.barrier()


@pytest.mark.quick
@on_ranks(3)
def test_objects_travel() -> None:
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 2])
    found = [
        hvd.broadcast_object({"from": rank} if rank == 1 else None, root_rank=1),
        hvd.broadcast_object(OrderedDict(a=[rank]), name="named"),
        hvd.broadcast_object(lambda: rank + 40, root_rank=2)(),
        hvd.broadcast_object(b"x" * 5_000_000 if rank == 0 else b"")[-1:],
        hvd.allgather_object("x" * rank),
        hvd.allgather_object({rank}, name="sets"),
    ]
    assert found == [{"from": 1}, OrderedDict(a=[0]), 42, b"x", ["", "x", "xx"], [{0}, {1}, {2}]]
    if pair.included():
        assert hvd.broadcast_object(rank, root_rank=2, process_set=pair) == 2
        assert hvd.allgather_object(rank, process_set=pair) == [0, 2]
