"""States of PyTorch objects, in one process: what is saved, undone, restored and written to a file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_double import Job, begin_anew

import horovod.torch as hvd
from horovod import context
from horovod.errors import InitError, PeerLostError


def parts(seed: int = 0) -> tuple[torch.nn.Module, Any]:
    """A model with everything that a step changes, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
    )
    return model, hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())


def step_of(state: Any, optimizer: Any, failure: Exception | None = None) -> None:
    """Train with numbers that depend on the random generator; fail as a lost rank makes it."""
    loss = state.model(torch.randn(16, 4)).square().mean()
    loss.backward()
    if failure is not None:
        raise failure
    optimizer.step()
    optimizer.zero_grad()


def everything(state: Any) -> list[Any]:
    """All values of a state, to compare."""
    found = {**state.model.state_dict(), "rng": torch.get_rng_state()}
    for number, values in state.optimizer.state_dict()["state"].items():
        found.update({f"{number}.{key}": value for key, value in values.items()})
    return [(name, torch.as_tensor(value).tolist()) for name, value in found.items()]


def test_a_run_with_failures_is_equal_to_one_without(job: Job) -> None:
    """Steps fail in their forward and backward passes; batch norm, dropout and Adam must not notice."""
    results = []
    for failing in ((), (2, 3, 7)):
        model, optimizer = parts()
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
        calls = [0]

        @hvd.elastic.step
        def one(state: Any, calls: list[int] = calls, failing: Any = failing, optimizer: Any = optimizer) -> None:
            calls[0] += 1
            state.batch += 1
            step_of(state, optimizer, PeerLostError("x") if calls[0] in failing else None)

        @hvd.elastic.run
        def train(state: Any, one: Any = one) -> None:
            while state.batch < 6:
                one(state)

        train(state)
        assert state.progress == 6
        assert calls[0] == 6 + len(failing)
        results.append(everything(state))
    assert results[0] == results[1]
    assert job.number == 5


def test_a_commit_is_restored_to_the_bit(job: Job) -> None:
    model, optimizer = parts()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, more=[])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state.other = "untracked"
    step_of(state, optimizer)
    scheduler.step()
    state.commit()
    before = everything(state)
    weight = model[0].weight
    for _ in range(2):
        step_of(state, optimizer)
        scheduler.step()
        state.batch += 1
        state.more.append(1)
        state._go_back()
        assert everything(state) == before
        assert (state.batch, state.more) == (0, [])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        assert model[0].weight is weight
        assert weight.grad is None


def test_a_step_that_changed_parameters_is_not_kept(job: Job) -> None:
    model, optimizer = parts()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    state.capture()
    step_of(state, optimizer)
    assert not state.undo()
    state.capture()
    with pytest.raises(PeerLostError):
        step_of(state, optimizer, PeerLostError("x"))
    assert state.undo()


class Written(torch.optim.Optimizer):
    """An optimizer that writes ``data``, which no version counter sees."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)


def _fused(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1, fused=True)


def _warming_up(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, 0.0, fused=True)


def _of_last_layer(parameters: Any) -> Any:
    return _fused(list(parameters)[-2:])


@pytest.mark.parametrize("make", [_fused, _warming_up, _of_last_layer, Written])
def test_a_change_that_no_version_counter_sees_is_found(make: Any, job: Job) -> None:
    layers = [module for _ in range(5) for module in (torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 40))
    optimizer = make(model.parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    for failure in (None, PeerLostError("x"), None):
        state.capture()
        versions = [parameter._version for parameter in model.parameters()]
        try:
            step_of(state, optimizer, failure)
        except PeerLostError:
            assert state.undo()
        else:
            assert versions == [parameter._version for parameter in model.parameters()]
            assert not state.undo()


@pytest.mark.parametrize("make", [_fused, Written])
def test_a_change_of_one_row_is_found(make: Any, job: Job) -> None:
    table = torch.nn.Embedding(100, 3)
    optimizer = hvd.DistributedOptimizer(make(table.parameters()), table.named_parameters())
    state = hvd.elastic.TorchState(model=table, optimizer=optimizer)
    before, version = table.weight.detach().clone(), table.weight._version
    state.capture()
    table(torch.tensor([37])).sum().backward()
    optimizer.step()
    assert not state.undo()
    changed = (table.weight != before).any(dim=1).nonzero()
    assert changed.tolist() == [[37]]
    assert table.weight._version == version


def test_an_assigned_buffer_is_set_back(job: Job) -> None:
    class Average(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("none", None)

        def forward(self, x: Any) -> Any:
            self.mean = 0.9 * self.mean + 0.1 * x
            return x

    model = Average()
    state = hvd.elastic.TorchState(model=model)
    model(torch.ones(2))
    state.capture()
    held = model.mean
    model(torch.ones(2))
    assert state.undo()
    assert model.mean is held
    torch.testing.assert_close(held, torch.full((2,), 0.1))


def test_handlers_go_by_type_and_users_may_add_some(job: Job) -> None:
    class Handler(hvd.elastic.StateHandler):
        def save(self) -> None:
            self.saved = list(self.value)

        def restore(self) -> None:
            self.value[:] = self.saved

        def sync(self) -> None:
            self.value.append("synced")

    before = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([(list, Handler), *before])
    try:
        model, optimizer = parts()
        sampler = hvd.elastic.ElasticSampler(range(10))
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, names=["a"], epoch=1)
    finally:
        hvd.elastic.set_handler_registry(before)
    assert sorted(state._handlers) == ["model", "names", "optimizer", "sampler"]
    assert state.digest() == "", "the names are sent after each change, as in Horovod"
    assert hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=1).digest()
    state.names.append("b")
    state.restore()
    assert state.names == ["a"]
    state.sync()
    assert state.names == ["a", "synced"]
    state.names = ["new"]
    state.names.append("lost")
    state.restore()
    assert state.names == ["new"]
    other = copy.deepcopy(model)
    state.model = other
    assert state._handlers["model"].value is other
    empty = hvd.elastic.TorchState(epoch=2)
    assert (empty.model, empty.optimizer, empty.epoch) == (None, None, 2)


def test_a_state_goes_through_a_file(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings:
        checkpoint_dir = str(tmp_path)
        bucket_bytes = 1 << 20

    monkeypatch.setattr(context, "config", Settings)

    def make(seed: int) -> Any:
        model, optimizer = parts(seed)
        model.register_buffer("bits", torch.full((3,), seed + 0.5, dtype=torch.bfloat16))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        sampler = hvd.elastic.ElasticSampler(range(10), seed=4)
        return hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=seed)

    def train(state: Any) -> Any:
        if state.progress:
            return state
        step_of(state, state.optimizer)
        state.scheduler.step()
        state.sampler.record_batch(0, 3)
        state.epoch = 5
        state.commit()
        raise PeerLostError("x")

    first, second, job.answers = make(1), make(2), [None, InitError("too few")]
    with pytest.raises(InitError):
        hvd.elastic.run(train)(first)
    (path,) = tmp_path.iterdir()
    begin_anew(monkeypatch)
    others = {
        "Missing key": hvd.elastic.TorchState(torch.nn.Linear(7, 7)),
        r"the checkpoint has no 'net'": hvd.elastic.TorchState(net=parts()[0]),
    }
    for why, other in others.items():
        with pytest.raises(ValueError, match=rf"(?s)^{path} does not fit this state \(.*{why}"):
            hvd.elastic.run(train)(other)
    assert hvd.elastic.run(train)(second) is second
    assert [found[:-1] for found in everything(first)] == [found[:-1] for found in everything(second)]
    assert everything(first)[:-1] == everything(second)[:-1], "random generators are not in the file"
    assert second.model.bits.tolist() == [1.5] * 3
    assert (second.epoch, second.sampler.processed_num, second.progress) == (5, 3, 1)
    assert second.scheduler.state_dict() == first.scheduler.state_dict()


def test_digests_tell_states_apart(job: Job) -> None:
    model, optimizer = parts()
    sampler = hvd.elastic.ElasticSampler(range(8))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=1)
    digests = [state.digest()]
    assert state.digest() == digests[0]
    with torch.no_grad():
        model[0].weight.view(torch.int32)[0, 0] ^= 1
    digests.append(state.digest())
    state.epoch = 2
    digests.append(state.digest())
    step_of(state, optimizer)
    digests.append(state.digest())
    model[1].num_batches_tracked += 1  # of this rank alone
    assert state.digest() == digests[-1]
    optimizer.param_groups[0]["lr"] /= 2
    digests.append(state.digest())
    state.sampler.record_batch(0, 1)
    digests.append(state.digest())
    assert len(set(digests)) == 6


def test_digests_of_equal_tensors_are_equal(job: Job) -> None:
    def average() -> dict[str, Any]:
        weights = torch.ones(2, dtype=torch.bfloat16), torch.eye(2).to_sparse(), torch.nn.Parameter(torch.zeros(0))
        return {"count": torch.tensor(1.0), "weights": weights, "generator": torch.Generator().manual_seed(1)}

    states = [hvd.elastic.TorchState(average=average()) for _ in range(2)]
    assert states[0].digest() == states[1].digest()
    states[1].average["weights"][0][1] = 2
    assert states[0].digest() != states[1].digest()


def test_a_digest_of_one_element_whatever_its_stride(job: Job) -> None:
    model = torch.nn.Module()
    model.one = torch.nn.Parameter(torch.zeros(2)[::2])
    state = hvd.elastic.TorchState(model=model)
    before = state.digest()
    with torch.no_grad():
        model.one += 1
    assert state.digest() != before


def test_a_rate_is_scaled_after_a_restore_too(job: Job) -> None:
    model, optimizer = parts()
    groups = optimizer.param_groups
    scale = hvd.elastic.LearningRateScale(groups, reference_size=2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scale=scale)
    groups[0]["lr"] = 7.0
    state.restore()
    assert optimizer.param_groups[0] is groups[0]
    scale.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_handled_attribute_has_no_name_of_the_state(job: Job) -> None:
    with pytest.raises(ValueError, match="cannot have an attribute 'progress'"):
        hvd.elastic.TorchState(progress=parts()[0])


def test_a_model_that_is_assigned_is_captured(job: Job) -> None:
    state = hvd.elastic.TorchState(model=parts()[0])
    state.capture()
    state.model = parts(seed=1)[0]
    state.capture()
    state.model(torch.randn(16, 4))
    assert state.undo()
    assert state.model[1].num_batches_tracked == 0
    with torch.no_grad():
        state.model[0].weight += 1
    assert not state.undo()


def test_a_training_function_needs_a_state() -> None:
    with pytest.raises(ValueError, match=rf"needs a state first. Received: Linear \(at {__file__}:"):
        hvd.elastic.run(lambda _: None)(torch.nn.Linear(1, 1))


def test_a_model_or_optimizer_without_a_state_is_refused(job: Job) -> None:
    with pytest.raises(ValueError, match=r"model is not one of torch. Received: OrderedDict"):
        hvd.elastic.TorchState(parts()[0].state_dict())
    with pytest.raises(ValueError, match=r"optimizer is not one of torch. Received: Adam, not called"):
        hvd.elastic.TorchState(parts()[0], torch.optim.Adam)
    assert hvd.elastic.TorchState(None, torch.amp.GradScaler("cpu"))  # has a state, as wrappers of optimizers have
