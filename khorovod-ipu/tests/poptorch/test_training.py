"""Training in one process: replicas and accumulation have the arithmetic of one large batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch

ROWS = 3
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sgd": (lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adam": (lambda p: poptorch.optim.Adam(p, lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw": (
        lambda p: poptorch.optim.AdamW(p, lr=0.01, loss_scaling=128.0, bias_correction=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ),
    "rmsprop": (lambda p: poptorch.optim.RMSprop(p, lr=0.01), lambda p: torch.optim.RMSprop(p, lr=0.01)),
}


class Net(torch.nn.Module):
    """A model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        out = self.layers(x)
        if target is None:
            return out
        return out, poptorch.identity_loss(torch.nn.functional.mse_loss(out, target), reduction="mean")


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(11)
    return torch.randn(rows, 4, generator=source).double(), torch.randn(rows, 2, generator=source).double()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def options(replicas: int = 1, accumulation: int = 1, iterations: int = 1) -> poptorch.Options:
    found = poptorch.Options().replicationFactor(replicas).deviceIterations(iterations)
    found.Training.gradientAccumulation(accumulation)
    return found


def plain(net: Net, optimizer: torch.optim.Optimizer, steps: int, rows: int) -> torch.Tensor:
    x, y = data(steps * rows)
    for i in range(steps):
        optimizer.zero_grad()
        net(x[i * rows : (i + 1) * rows], y[i * rows : (i + 1) * rows])[1].backward()
        optimizer.step()
    return flat(net)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replicas_and_accumulation_are_one_large_batch(kind: str) -> None:
    ours, reference = Net(), Net()
    make, make_reference = OPTIMIZERS[kind]
    model = poptorch.trainingModel(ours, options(2, 3, 2), make(ours.parameters()))
    for half in range(2):  # two calls of two iterations each
        rows = ROWS * 12
        x, y = (t[half * rows : (half + 1) * rows] for t in data(2 * rows))
        output, loss = model(x, y)
        assert output.shape == (2 * ROWS, 2) and loss.shape == (2,)
    expected = plain(reference, make_reference(reference.parameters()), 4, ROWS * 6)
    torch.testing.assert_close(flat(ours), expected, rtol=1e-12, atol=1e-12)


def test_a_sum_is_so_many_times_the_mean() -> None:
    ours, reference = Net(), Net()
    summing = options(2, 2)
    summing.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    poptorch.trainingModel(ours, summing, poptorch.optim.SGD(ours.parameters(), lr=0.01))(*data(4 * ROWS))
    expected = plain(reference, torch.optim.SGD(reference.parameters(), lr=0.04), 1, 4 * ROWS)
    torch.testing.assert_close(flat(ours), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "period", "rows", "losses"),
    [
        (poptorch.OutputMode.Final, None, 2 * ROWS, 2), (poptorch.OutputMode.All, None, 16 * ROWS, 16),
        (poptorch.OutputMode.EveryN, 2, 8 * ROWS, 8), (poptorch.OutputMode.Sum, None, 2 * ROWS, 2),
    ],
)  # fmt: skip
def test_the_output_mode_says_which_results_come_back(mode: Any, period: int | None, rows: int, losses: int) -> None:
    net, chosen = Net(), options(2, 2, 4).outputMode(mode, period)
    model = poptorch.trainingModel(net, chosen, poptorch.optim.SGD(net.parameters(), lr=0.0))
    x, y = data(16 * ROWS)
    output, loss = model(x, y)
    assert output.shape == (rows, 2) and loss.shape == (losses,) and not loss.requires_grad
    everything = net(x)
    if mode == poptorch.OutputMode.All:
        torch.testing.assert_close(output, everything)
    if mode == poptorch.OutputMode.Sum:  # per replica, over iterations and accumulation
        torch.testing.assert_close(output, everything.view(8, 2 * ROWS, 2).sum(0))


def test_results_stay_what_they_were_when_they_were_computed() -> None:
    class _Shown(Net):
        def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
            return self.layers[0].weight, super().forward(x, target)[1]

    net = _Shown()
    at_first = net.layers[0].weight.detach().clone()
    model = poptorch.trainingModel(
        net, options(iterations=2).outputMode(poptorch.OutputMode.All), poptorch.optim.SGD(net.parameters(), lr=0.1)
    )
    seen, _ = model(*data(2 * ROWS))
    then = seen.clone()
    model(*data(2 * ROWS))
    assert torch.equal(seen[:5], at_first) and not torch.equal(seen[5:], at_first) and torch.equal(seen, then)


def test_inference_runs_all_rows_and_leaves_the_model_as_it_was() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
    model = poptorch.inferenceModel(net, poptorch.Options().replicationFactor(2).deviceIterations(2))
    x = torch.randn(8, 4)
    torch.testing.assert_close(model(x), net[0](x))
    assert net.training and net[1].training and model(x).requires_grad is False
    with pytest.raises(ValueError, match="gradientAccumulation=2 has no meaning without training"):
        poptorch.inferenceModel(net, options(1, 2))(x)


def test_each_replica_has_its_own_running_statistics_and_random_numbers() -> None:
    net = torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(1, momentum=1.0), "drop": torch.nn.Dropout(0.5)})
    net.forward = lambda x: (net["drop"](torch.ones(64)), net["norm"](x).sum() * net["norm"].weight.sum())
    model = poptorch.trainingModel(
        net, poptorch.Options().replicationFactor(2).randomSeed(1), poptorch.optim.SGD(net.parameters(), lr=0.0)
    )
    x = torch.tensor([[1.0], [3.0], [10.0], [30.0]])
    dropped, _ = model(x)
    assert not torch.equal(dropped[:64], dropped[64:])
    assert net["norm"].running_mean.tolist() == [2.0], "those of the first replica"
    model(x)
    assert net["norm"].running_mean.tolist() == [2.0] and int(net["norm"].num_batches_tracked) == 2


def test_all_replicas_of_an_inference_model_follow_the_training() -> None:
    norm = torch.nn.BatchNorm1d(1)
    norm_and_loss = torch.nn.ModuleDict({"norm": norm})
    norm_and_loss.forward = lambda x: norm(x).square().mean() if norm.training else norm(x)
    training = poptorch.trainingModel(norm_and_loss, optimizer=torch.optim.SGD(norm.parameters(), lr=0.1))
    inference = poptorch.inferenceModel(norm_and_loss, poptorch.Options().replicationFactor(2))
    x = torch.tensor([[1.0], [2.0], [10.0], [30.0]])
    for scale in (1, 5, 25):
        training(x * scale)
        torch.testing.assert_close(inference(x), torch.nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias
        ))  # fmt: skip
    with torch.no_grad():
        norm.running_mean.fill_(7.0)
    first, second = inference(torch.zeros(2, 1)).tolist()
    assert first == second


def test_hyperparameters_change_when_they_are_set_and_momentum_stays() -> None:
    ours, reference = Net(), Net()
    optimizer = poptorch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    model = poptorch.trainingModel(ours, options(), optimizer)
    x, y = data(ROWS)
    optimizer.param_groups[0]["lr"] = 100.0  # nobody is told
    model(x, y)
    model.setOptimizer(poptorch.optim.SGD(ours.parameters(), lr=0.01, momentum=0.9))
    model(x, y)
    assert optimizer.param_groups[0]["lr"] == 100.0
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for rate in (0.1, 0.01):
        other.param_groups[0]["lr"] = rate
        other.zero_grad()
        reference(x, y)[1].backward()
        other.step()
    torch.testing.assert_close(flat(ours), flat(reference), rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="Adam cannot follow SGD"):
        model.setOptimizer(poptorch.optim.Adam(ours.parameters()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_that_is_set_keeps_a_state_that_was_loaded(kind: type[torch.optim.Optimizer]) -> None:
    def optimizer_of(net: Net) -> torch.optim.Optimizer:
        more: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return kind(net.parameters(), lr=0.1, **more)  # type: ignore[call-arg]

    net = Net()
    optimizer = optimizer_of(net)
    model = poptorch.trainingModel(net, options(), optimizer)
    x, y = data(ROWS)
    model(x, y)
    weights, state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    model.setOptimizer(optimizer_of(net))  # a new one goes on from the state of the present one
    model(x, y)
    second = flat(net)
    model(x, y)  # the state of the device is now another one
    loaded = optimizer_of(net)
    loaded.load_state_dict(state)
    model.load_state_dict(weights)
    model.setOptimizer(loaded)
    model(x, y)
    torch.testing.assert_close(flat(net), second, rtol=0, atol=0)


def test_weights_are_the_models_own_and_a_checkpoint_loads() -> None:
    net = Net()
    saved = copy.deepcopy(net.state_dict())
    model = poptorch.trainingModel(net, options(), poptorch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="before the model was compiled"):
        model.copyWeightsToHost()
    before = flat(net)
    model.compile(*data(ROWS))
    assert model.isCompiled() and model.isAttachedToDevice() and torch.equal(flat(net), before)
    model(*data(ROWS))
    model.copyWeightsToHost()
    assert not torch.equal(flat(net), before) and model.state_dict().keys() == saved.keys()
    model.load_state_dict(saved)
    model.copyWeightsToDevice()
    assert torch.equal(flat(net), before) and all(p.grad is None for p in net.parameters())
    model.detachFromDevice()
    assert not model.isAttachedToDevice()
    model.attachToDevice()
    model.destroy()
    assert not model.isCompiled()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda w: w * 2, "a training model returns its loss"),
        (lambda w: (w, poptorch.identity_loss(w.detach(), "sum")), "the loss depends on no weight"),
        (
            lambda w: poptorch.identity_loss(w[0], "sum") + poptorch.identity_loss(w[1], "sum"),
            "2 losses are marked, and the last one does not depend on all others",
        ),
        (lambda w: poptorch.identity_loss(w, "median"), 'reduction must be "mean", "sum" or "none"'),
    ],
)
def test_a_model_without_a_loss_is_told_so(forward: Callable[[torch.Tensor], Any], message: str) -> None:
    net = torch.nn.Linear(2, 2)
    net.forward = lambda x: forward(net.weight)  # type: ignore[method-assign]
    with pytest.raises(ValueError) as caught:
        poptorch.trainingModel(net)(torch.zeros(1))
    assert message in str(caught.value)


def test_a_loss_need_not_be_marked_nor_be_the_only_number() -> None:
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    net.forward = lambda x: {"count": torch.tensor(2.0), "loss": (net.weight * x).sum(), "name": "x"}  # type: ignore[method-assign]
    out = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5))(torch.tensor([[1.0, 2.0]]))
    assert (out["loss"].item(), out["name"], net.weight.tolist()) == (3.0, "x", [[0.5, 0.0]])


def test_several_losses_may_be_parts_of_the_last_one() -> None:
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(net.weight)

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = [poptorch.identity_loss(net.weight[0, i] * x[0, i], "none") for i in range(2)]
        return poptorch.identity_loss(torch.stack(parts), "sum")

    net.forward = forward  # type: ignore[method-assign]
    poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5))(torch.tensor([[1.0, 2.0]]))
    assert net.weight.tolist() == [[0.5, 0.0]]


def test_weights_that_no_optimizer_has_stay_and_gather_nothing() -> None:
    net = Net()
    trained = net.layers[0]
    before = copy.deepcopy(net.layers[2].state_dict())
    model = poptorch.trainingModel(net, options(), poptorch.optim.SGD(trained.parameters(), lr=0.1))
    model(*data(ROWS))
    assert all(torch.equal(before[name], value) for name, value in net.layers[2].state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_an_input_that_cannot_be_divided_names_the_factors() -> None:
    net = Net()
    model = poptorch.trainingModel(net, options(2, 3, 2), poptorch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="2 device iterations x 3 gradient accumulation x 2 replicas"):
        model(*data(7))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module"):
        poptorch.trainingModel(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"options must be poptorch.Options; received dict"):
        poptorch.inferenceModel(net, {"replicationFactor": 2})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="setOptimizer takes an optimizer; received str"):
        poptorch.trainingModel(net, None, "sgd")  # type: ignore[arg-type]


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    net = Net()
    model = poptorch.trainingModel(net, options(2), poptorch.optim.SGD(net.parameters(), lr=0.1))
    net.eval()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(2, 3).double(), torch.zeros(2, 2).double())
    assert not net.training and all(p.grad is None for p in net.parameters())
    model(*data(2 * ROWS))


def test_lamb_steps_as_long_as_the_weights_allow() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = poptorch.optim.LAMB([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([1.0, 1.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) - 0.1 * 5 / 2**0.5, rtol=1e-6, atol=1e-6)


def test_hints_change_nothing() -> None:
    layer = poptorch.BeginBlock(torch.nn.Identity(), "first", ipu_id=0)
    with poptorch.Block("b", ipu_id=1):
        x = poptorch.recomputationCheckpoint(poptorch.nop(layer(torch.ones(2))))
    assert torch.equal(poptorch.set_available_memory(x, 0.1), torch.ones(2))
    assert torch.equal(poptorch.serializedMatMul(torch.eye(2), torch.eye(2), "none"), torch.eye(2))
    where = poptorch.TensorLocationSettings().minElementsForOffChip(4).useOnChipStorage(False)
    assert options().TensorLocations.setWeightLocation(where).toDict() == {"setWeightLocation": where}
    options().setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("first").ipu(0)))


class _Where(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + poptorch.isRunningOnIpu()


def test_control_and_parts_of_tensors() -> None:
    x, one = torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.tensor(1)
    with poptorch.NameScope("part"), poptorch.MultiConv().availableMemoryProportions(0.1):
        [total, count] = poptorch.for_loop(3, lambda t, c: (t * 2, c + 1), [x, one])
    assert torch.equal(total, x * 8) and count == 4
    [chosen] = poptorch.cond(count > 3, lambda t: t + 1, [x], lambda t: t - 1, [x])
    assert torch.equal(chosen, x + 1)
    part = poptorch.dynamic_slice(x, 1, one, 2)
    fresh = poptorch.dynamic_update(x, part * 10, -1, one, 2)
    assert fresh.tolist() == [[0, 10, 20], [3, 40, 50]]
    fresh.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[1, 10, 10], [1, 10, 10]]
    with pytest.raises(ValueError, match="took 2 tensors and returned 1"):
        poptorch.for_loop(2, lambda t, c: t, [x, one])
    with pytest.raises(AttributeError, match=r"nor Linear has 'getLatency'\. See"):
        _ = poptorch.inferenceModel(torch.nn.Linear(1, 1)).getLatency
    assert [float(model(torch.zeros(1))) for model in (_Where(), poptorch.inferenceModel(_Where()))] == [0, 1]


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_rmsprop_of_tensorflow_follows_its_formula(centered: bool, maximize: bool) -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    values = {"alpha": 0.9, "eps": 0.1, "weight_decay": 0.01, "momentum": 0.9, "centered": centered}
    optimizer = poptorch.optim.RMSprop([w], lr=0.01, use_tf_variant=True, maximize=maximize, **values)
    expected, squares, mean, momentum = w.detach().clone(), 1.0, 0.0, 0.0
    for rate in (0.01, 0.1, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (-(w**3) if maximize else w**3).sum().backward()
        optimizer.step()
        g = 3 * expected**2 + 0.01 * expected
        squares, mean = 0.9 * squares + 0.1 * g * g, 0.9 * mean + 0.1 * g
        momentum = 0.9 * momentum + rate * g / (squares - centered * mean**2 + 0.1) ** 0.5
        expected = expected - momentum
        torch.testing.assert_close(w.detach(), expected)
        optimizer = copy.deepcopy(optimizer)  # with its parameters, and still like TensorFlow
        [w] = optimizer.param_groups[0]["params"]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("kind", ["AdamW", "LAMB"])
def test_adam_without_bias_correction_follows_its_formula(kind: str) -> None:
    make, source = getattr(poptorch.optim, kind), torch.Generator().manual_seed(5)
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = make([w], lr=0.01, eps=0.1, weight_decay=0.1, bias_correction=False)
    expected, mean, square = w.detach().clone(), torch.zeros(2).double(), torch.zeros(2).double()
    for _ in range(4):
        w.grad = torch.randn(2, generator=source).double()
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * w.grad, 0.999 * square + 0.001 * w.grad**2
        step = mean / (square.sqrt() + 0.1) + 0.1 * expected
        expected = expected - 0.01 * step * (expected.norm() / step.norm() if kind == "LAMB" else 1.0)
        torch.testing.assert_close(w.detach(), expected)
        optimizer = copy.deepcopy(optimizer)  # with its parameters
        [w] = optimizer.param_groups[0]["params"]
    with pytest.raises(ValueError, match="cannot be combined with amsgrad"):
        poptorch.optim.AdamW([w], amsgrad=True, bias_correction=False)
