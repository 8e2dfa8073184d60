"""Compressors of ``DistributedOptimizer``: those that are included, Horovod's kind, and those with a state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import on_ranks

import horovod.torch as hvd
from horovod.errors import RequestError
from horovod.torch.compression import BucketCompressor


class Halves(BucketCompressor):
    """Sends every second element, those that were left out in the next step."""

    name = "halves"

    def compress(self, tensor: Any, state: dict[str, Any]) -> tuple[Any, Any]:
        if not state:
            state.update(step=0, left=torch.zeros_like(tensor))
        total, first = tensor + state["left"], state["step"] % 2
        state.update(step=state["step"] + 1, left=total.clone())
        state["left"][first::2] = 0
        return total[first::2], first

    def decompress(self, tensor: Any, ctx: Any, state: dict[str, Any]) -> Any:
        found = torch.zeros_like(state["left"])
        found[ctx::2] = tensor
        return found


def _model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).double()


def _train(steps: int, compression: Any, saved: Any = None, **options: Any) -> list[Any]:
    """Return the gradients of each step; the gradient of a parameter is the number of the step times rank + 1."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression, **options
    )
    if saved:
        compression.load_state_dict(saved)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        (sum(parameter.sum() for parameter in model.parameters()) * (step + 1.0) * (hvd.rank() + 1)).backward()
        optimizer.synchronize()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
    return found


@on_ranks(3)
def test_a_compressor_keeps_a_state_for_each_bucket() -> None:
    compression = Halves()
    found = _train(6, compression, op=hvd.Sum)
    # Each element gets its own share in one step and two shares in the next.
    ranks = 1 + 2 + 3
    total = [sum(step) for step in zip(*found, strict=True)]
    for grads in total:
        assert set(grads.unique().tolist()) <= {(1 + 2 + 3 + 4 + 5 + 6) * ranks, (1 + 2 + 3 + 4 + 5) * ranks}
    (bucket,) = compression.state_dict()["buckets"]
    assert bucket.startswith("bucket0[")
    assert compression.state_dict()["buckets"][bucket][1]["step"] == 6


@on_ranks(2)
def test_missing_gradients_are_known_without_being_compressed() -> None:
    """A parameter that has a gradient on one rank has it on all; one without gradients anywhere has none."""
    model = _model()
    unused = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), unused], lr=0.1), compression=Halves(), op=hvd.Sum
    )
    for _ in range(3):
        optimizer.zero_grad()
        (model[hvd.rank() % 2].weight.sum() * 2).backward()
        optimizer.synchronize()
        assert [layer.weight.grad is not None for layer in model] == [True, True]
        assert [layer.bias.grad for layer in model] == [None, None]
        assert unused.grad is None
        with optimizer.skip_synchronize():
            optimizer.step()


class Doubled:
    """Horovod's kind: two functions, on an object as well as on a class."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        return tensor * 2, tensor.shape

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        assert tensor.shape == ctx
        return tensor / 2


@on_ranks(2)
def test_included_ones_and_those_of_two_functions() -> None:
    want = _train(3, hvd.Compression.none)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16, Doubled()):
        for grads, other in zip(_train(3, compression), want, strict=True):
            for got, expected in zip(grads, other, strict=True):
                assert torch.equal(got, expected), (compression, got, expected)


@on_ranks(1)
def test_where_a_state_has_no_place() -> None:
    model, compression = _model(), Halves()

    def wrap(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression, **options)

    for wrong in (lambda: wrap(op=hvd.Adasum), lambda: wrap(host_optimizer=True)):
        with pytest.raises(RequestError, match="the compressor 'halves' keeps a state for each bucket"):
            wrong()
    with pytest.raises(RequestError, match="the compressor 'halves' keeps a state for each bucket"):
        hvd.allreduce(torch.zeros(2), compression=compression)
    kept = wrap()
    with pytest.raises(RequestError, match="is used by another optimizer"):
        wrap()
    del kept
    with pytest.raises(RequestError, match="this state is of the compressor 'other', not of 'halves'"):
        compression.load_state_dict({"name": "other"})


class Normed(BucketCompressor):
    """Divides by the norm over all ranks, which a collective inside ``compress`` finds.

    Args:
        named: whether that collective has a name.
    """

    name = "normed"

    def __init__(self, named: bool = True) -> None:
        self.named = named

    def compress(self, tensor: Any, state: dict[str, Any]) -> tuple[Any, Any]:
        name = f"{self.bucket}.norm" if self.named else None
        handle = hvd.allreduce_async(tensor.square().sum(), op=hvd.Sum, name=name)
        return tensor / 2, handle

    def decompress(self, tensor: Any, ctx: Any, state: dict[str, Any]) -> Any:
        return tensor * 2 / hvd.synchronize(ctx).sqrt()


def _two_buckets(compression: Any) -> tuple[Any, list[Any]]:
    """Return an optimizer with a bucket for each of two parameters, and these."""
    parameters = [torch.nn.Parameter(torch.zeros(300, dtype=torch.float64)) for _ in range(2)]
    plain = torch.optim.SGD(parameters, lr=0.1)
    groups = [[parameter] for parameter in parameters]
    return hvd.DistributedOptimizer(plain, compression=compression, op=hvd.Sum, groups=groups), parameters


@on_ranks(2)
def test_named_collectives_of_a_compressor_pair_by_bucket() -> None:
    optimizer, parameters = _two_buckets(Normed())
    for _ in range(3):
        optimizer.zero_grad()
        # The bucket that is complete in backward() is another one on each rank.
        (parameters[hvd.rank()] * (hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        for number, parameter in enumerate(parameters):
            assert torch.allclose(parameter.grad, torch.full_like(parameter, 300**-0.5)), (number, parameter.grad)
        with optimizer.skip_synchronize():
            optimizer.step()


@on_ranks(2)
def test_wrong_compressors_are_named() -> None:
    def step(compression: Any) -> None:
        optimizer, parameters = _two_buckets(compression)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.synchronize()

    with pytest.raises(RequestError, match=r"allreduce has no name.*'normed'.*name=f\"{self.bucket}.norm\""):
        step(Normed(named=False))
    with pytest.raises(RequestError, match=r"compression is the class Halves.*pass an object: Halves\(\)"):
        step(Halves)
    wrong = Halves()
    wrong.compress = lambda tensor, state: tensor  # type: ignore[method-assign]
    with pytest.raises(RequestError, match=r"compress\(\) of the compressor 'halves' must return \(tensor, ctx\)"):
        step(wrong)
    wrong = Halves()
    wrong.decompress = lambda tensor, ctx, state: tensor[:1]  # type: ignore[method-assign]
    with pytest.raises(RequestError, match=r"decompress\(\) of the compressor 'halves' must return .* shape \[1\]"):
        step(wrong)


@on_ranks(2)
def test_a_state_of_other_places_of_parameters_is_not_used() -> None:
    saved: Any = None
    for order in ("abcd", "acbd"):
        parameters = {name: torch.nn.Parameter(torch.ones(16)) for name in "abcd"}
        compression = Halves()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), compression
        )
        if saved:
            compression.load_state_dict(saved)
        product = torch.ones(16)
        for name in order:
            product = product * parameters[name]
        product.sum().backward()
        optimizer.step()
        saved = compression.state_dict()
    # Backward comes to b and c in another order, so the bucket has the same name and length, and not the same elements.
    assert {name: state["step"] for name, (_, state) in saved["buckets"].items()} == {"bucket0[d..a]": 1}


@pytest.mark.parametrize("joins", [False, True], ids=["a new job", "join"])
@on_ranks(2)
def test_states_of_ranks_that_may_have_taken_fewer_steps_are_not_used(joins: bool) -> None:
    """A rank that has joined an elastic job has no state, and one that has called ``join`` early an older one."""
    compression = Halves()
    _train(3, compression)
    saved = copy.deepcopy(compression.state_dict())
    for loaded, steps in ((None, 1), (saved, 4)):
        if joins:
            hvd.join()
        else:
            hvd.shutdown()
            hvd.init()
        _train(1, compression, loaded)
        [(_, state)] = compression.state_dict()["buckets"].values()
        assert state["step"] == steps


@on_ranks(2)
def test_an_elastic_state_keeps_the_states_of_rank_0() -> None:
    compression = Halves()
    _train(3, compression)
    state = hvd.elastic.TorchState(compression=compression)
    hvd.shutdown()
    hvd.init()
    state.sync()
    [(_, kept)] = compression.state_dict()["buckets"].values()
    left, others = hvd.allgather_object(kept["left"].tolist())
    assert left == others
    _train(1, compression)
    [(_, kept)] = compression.state_dict()["buckets"].values()
    assert kept["step"] == 4


def test_a_state_of_another_length_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    compression = Halves()
    compression.state_of("bucket", 4)["step"] = 7
    assert compression.state_of("bucket", 4) == {"step": 7}
    assert compression.state_of("bucket", 8) == {}
