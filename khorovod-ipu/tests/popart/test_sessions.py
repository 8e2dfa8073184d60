"""Inputs, anchors, weights, optimizers and options of a session: what is accepted, and what an error says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from popart_models import connect, mlp, options, session_of, step, weights_of

import popart

FEEDS = {"x": np.arange(8, dtype=np.float32).reshape(2, 4), "label": np.array([0, 2], np.int32)}


@pytest.mark.parametrize(
    ("kind", "period", "batches", "accumulation", "replicas", "leading"),
    [
        ("Final", None, 4, 3, 2, [2]), ("SUM", None, 4, 3, 2, [2]), ("all", None, 4, 3, 2, [4, 3, 2]),
        ("EveryN", 2, 4, 3, 2, [2, 3, 2]), ("All", None, 1, 3, 1, [3]), ("Final", None, 1, 1, 1, []),
        ("All", None, 4, 1, 1, [4]), ("EveryN", 4, 4, 1, 1, []),
    ],
)  # fmt: skip
def test_anchors_have_a_dimension_for_each_number_above_one(
    kind: str, period: int | None, batches: int, accumulation: int, replicas: int, leading: list[int]
) -> None:
    chosen = options(replicatedGraphCount=replicas, accumulationFactor=accumulation)
    art = popart.AnchorReturnType(kind) if period is None else popart.AnchorReturnType(kind, period)
    session = session_of(mlp(2), chosen, popart.ConstSGD(0.0), batches, {"x": art})
    session.weightsFromHost()
    assert (session.replicationFactor, session.accumulationFactor) == (replicas, accumulation)
    count = batches * accumulation * replicas
    x = np.arange(count * 8, dtype=np.float32)
    found = step(session, {"x": x, "label": np.zeros(2 * count, np.int32)})["x"]
    assert list(found.shape) == [*leading, 2, 4]
    whole = x.reshape(batches, accumulation, replicas, 2, 4)
    expected = {
        "final": whole[-1, -1], "sum": whole.sum(axis=(0, 1)), "all": whole,
        "everyn": whole[(period or 1) - 1 :: period or 1],
    }[kind.lower()]  # fmt: skip
    np.testing.assert_array_equal(found, expected.reshape(found.shape))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({**FEEDS, "x": np.zeros((3, 4), np.float32)},
         r"'x' must have 8 elements, 8 x 1 batches per step x 1 acc.* x 1 replicas; received 12, the shape \[3, 4\]"),
        ({"x": FEEDS["x"]}, "the input 'label' is missing in PyStepIO"),
        ({**FEEDS, "y": FEEDS["x"]}, "'y' is not an input that this session reads"),
        ({**FEEDS, "x": FEEDS["x"].astype(np.float64)}, r"array of float32; received float64.*astype\(np.float32\)"),
        ({**FEEDS, "label": np.array([0, 3], np.int32)}, "received the label 3; there are 3 classes"),
        ({**FEEDS, "label": np.array([0, -1], np.int32)}, "received the label -1"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_say_what_was_expected(feeds: dict[str, Any], message: str) -> None:
    session = session_of(mlp(2))
    session.weightsFromHost()
    with pytest.raises(popart.popart_exception, match=message):
        step(session, feeds)


def test_inference_takes_the_inputs_of_training_and_weights_of_any_shape_are_trained() -> None:
    model, _ = mlp(2)
    flow = popart.DataFlow(1, {"Softmax:0": popart.AnchorReturnType("All")})
    inference = popart.InferenceSession(model, flow, popart.DeviceManager().createCpuDevice())
    inference.prepareDevice()
    assert step(inference, FEEDS)["Softmax:0"].shape == (2, 3)
    builder = popart.Builder()
    start = {"number": np.float32(2), "nothing": np.zeros((0, 3), np.float32), "half": np.ones(2, np.float16)}
    number, nothing, half = (builder.addInitializedInputTensor(array, name) for name, array in start.items())
    parts = [number, builder.aiOnnx.reducesum([nothing]), builder.aiOnnx.cast([half], "FLOAT")]
    loss = builder.aiGraphcore.identityloss([builder.aiOnnx.sum(parts)], popart.ReductionType.Sum)
    session = session_of((builder.getModelProto(), loss), options(hostAllReduce=True), popart.ConstSGD(1.0))
    connect(session, lambda weight, gradient: gradient)
    session.weightsFromHost()
    step(session)
    found = weights_of(session)
    assert found["number"] == 0 and (found["half"] == 0).all() and found["nothing"].shape == (0, 3)


def test_arrays_must_be_contiguous_and_without_asserts_they_are_used_again() -> None:
    with pytest.raises(popart.popart_exception, match="'x' is not contiguous"):
        popart.PyStepIO({"x": np.zeros((4, 2), np.float32).T}, {})
    flow = {"x": popart.AnchorReturnType("All")}
    session = session_of(mlp(2), None, popart.ConstSGD(0.0), 3, flow)
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    stepio = popart.PyStepIO({"x": np.arange(16, dtype=np.float32), "label": np.zeros(2, np.int32)}, anchors)
    with pytest.raises(popart.popart_exception, match="must have 24 elements, 8 x 3 batches"):
        session.run(stepio)
    stepio.enableRuntimeAsserts(False)
    session.run(stepio)
    np.testing.assert_array_equal(anchors["x"].reshape(-1), [*range(16), *range(8)])
    session.run(stepio)
    np.testing.assert_array_equal(anchors["x"].reshape(-1), [*range(8, 16), *range(16)])


def test_callbacks_give_inputs_and_take_anchors() -> None:
    loss = mlp(2)[1]
    session = session_of(mlp(2), None, None, 2, {loss: popart.AnchorReturnType("All")})
    session.weightsFromHost()
    calls: list[str] = []
    target = np.zeros((), np.float32)
    stepio = popart.PyStepIOCallback(
        lambda name, prefetch: calls.append(name) or FEEDS[name],
        lambda name: calls.append(f"{name} read"),
        lambda name: calls.append(name) or target,
        lambda name: calls.append(f"{name} filled"),
    )
    session.run(stepio)
    assert calls == ["x", "x read", "label", "label read", loss, f"{loss} filled"] * 2
    assert target > 0


def test_a_session_must_be_ready() -> None:
    model, loss = mlp(2)
    device = popart.DeviceManager().createCpuDevice()
    session = popart.TrainingSession(model, popart.DataFlow(1, {}), loss, popart.ConstSGD(0.1), device)
    with pytest.raises(popart.popart_exception, match=r"call prepareDevice\(\) before run"):
        step(session, FEEDS)
    session.prepareDevice()
    with pytest.raises(popart.popart_exception, match=r"call weightsFromHost\(\) before run"):
        step(session, FEEDS)
    session.weightsFromHost()
    with device:
        step(session, FEEDS)
    with pytest.raises(popart.popart_exception, match="is detached"):
        step(session, FEEDS)


def test_weights_go_to_a_file_and_into_another_session(tmp_path: Path) -> None:
    session, other = session_of(mlp(2)), session_of(mlp(2, seed=9))
    session.weightsFromHost()
    step(session, FEEDS)
    session.modelToHost(str(tmp_path / "model.onnx"))
    other.resetHostWeights(str(tmp_path / "model.onnx"))
    for name, weight in weights_of(session).items():
        np.testing.assert_array_equal(weight, weights_of(other)[name])
    mine = {"w1": np.full((4, 5), 2.0, np.float32)}
    other.writeWeights(popart.PyWeightsIO(mine))
    assert (weights_of(other)["w1"] == 2).all()
    for wrong, message in (
        ({"w3": mine["w1"]}, "'w3' is not a weight of this session. There is: w1, w2"),
        ({"w2": mine["w1"]}, r"'w2' is float32 \[5, 3\]; received float32 \[4, 5\]"),
    ):
        with pytest.raises(popart.popart_exception, match=message):
            other.writeWeights(popart.PyWeightsIO(wrong))
    builder = popart.Builder()
    builder.addInitializedInputTensor(np.ones(1, np.float32), "w1")
    with pytest.raises(popart.popart_exception, match="does not have the weights w2"):
        other.resetHostWeights(builder.getModelProto())
    with pytest.raises(popart.popart_exception, match="is not an ONNX model"):
        other.resetHostWeights(b"\xff\xff\xff")
    with pytest.raises(popart.popart_exception, match="cannot be read"):
        other.resetHostWeights(str(tmp_path / "missing.onnx"))


def _by_torch(make: Any, steps: int) -> dict[str, Any]:
    session = session_of(mlp(2))
    weights = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in weights_of(session).items()}
    optimizer = make(list(weights.values()))
    x, label = torch.from_numpy(FEEDS["x"]), torch.from_numpy(FEEDS["label"]).long()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(torch.tanh(x @ weights["w1"]) @ weights["w2"], label).backward()
        optimizer.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (popart.SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (0.9, True), "lossScaling": (64, True),
                     "defaultWeightDecay": (0.1, True)}),
         lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)),
        (popart.Adam({"defaultLearningRate": (0.1, True), "defaultEps": (1e-3, True), "lossScaling": (8, True)},
                     accum_type=popart.DataType.FLOAT, accl1_type=popart.DataType.FLOAT),
         lambda p: torch.optim.Adam(p, 0.1, eps=1e-3)),
        (popart.Adam({"defaultLearningRate": (0.1, True), "defaultEps": (1e-3, True), "defaultWeightDecay": 0.1},
                     weight_decay_mode=popart.WeightDecayMode.L2Regularization),
         lambda p: torch.optim.Adam(p, 0.1, eps=1e-3, weight_decay=0.1)),
        (popart.Adam({"defaultLearningRate": (0.1, True), "defaultEps": (1e-3, True)}, mode=popart.AdamMode.AdaMax),
         lambda p: torch.optim.Adamax(p, 0.1, eps=1e-3)),
        (popart.Adaptive({"defaultEps": 1e-3, "defaultWeightDecay": 0.1}, popart.AdaptiveMode.AdaGrad),
         lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-3, weight_decay=0.1)),
        (popart.Adaptive({"defaultEps": 1e-3, "defaultMomentum": 0.9, "lossScaling": 8},
                         accl1_type=popart.DataType.FLOAT),
         lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-3, momentum=0.9)),
        (popart.Adaptive({"defaultEps": 1e-3}, mode=popart.AdaptiveMode.CenteredRMSProp),
         lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-3, centered=True)),
        (popart.Adaptive({"defaultLearningRate": 1.0, "defaultAlpha": 0.9}, mode=popart.AdaptiveMode.AdaDelta),
         lambda p: torch.optim.Adadelta(p, 1.0)),
    ],
    ids=["momentum", "adam", "regularized adam", "adamax", "adagrad", "rmsprop", "centered rmsprop", "adadelta"],
)  # fmt: skip
def test_optimizers_are_those_of_torch(optimizer: Any, make: Any) -> None:
    session = session_of(mlp(2), None, optimizer, batches=5)
    session.weightsFromHost()
    step(session, {name: np.stack([array] * 5) for name, array in FEEDS.items()})
    for name, expected in _by_torch(make, 5).items():
        np.testing.assert_allclose(weights_of(session)[name], expected, rtol=1e-4, atol=1e-5)


def test_single_weights_clipping_and_new_hyperparameters() -> None:
    optimizer = popart.SGD({"defaultLearningRate": (1.0, False)},
                           clip_norm_settings=[popart.ClipNormSettings.clipAllWeights(0.01)])  # fmt: skip
    optimizer.insertSpecific("w1", {"learningRate": (0.0, True)})
    session = session_of(mlp(2), None, optimizer)
    session.weightsFromHost()
    before = weights_of(session)
    step(session, FEEDS)
    after = weights_of(session)
    assert (after["w1"] == before["w1"]).all()
    assert 0 < np.linalg.norm(after["w2"] - before["w2"]) <= 0.01 * (1 + 1e-4)
    session.updateOptimizerFromHost(popart.SGD({"defaultLearningRate": (0.0, False)}))
    step(session, FEEDS)
    assert (weights_of(session)["w2"] == after["w2"]).all()
    with pytest.raises(popart.popart_exception, match=r"cannot change: weightDecay 0\.0 -> 0\.5"):
        session.updateOptimizerFromHost(popart.SGD({"defaultWeightDecay": (0.5, False)}))
    with pytest.raises(popart.popart_exception, match="made with SGD; received"):
        session.updateOptimizerFromHost(popart.Adam({}))
    with pytest.raises(popart.popart_exception, match=r"no hyperparameter 'learningRate'; did.*It has defaultLearning"):
        popart.SGD({"learningRate": (0.1, True)})
    for name, value in (("defaultLearningRate", -0.1), ("defaultLearningRate", float("nan")), ("lossScaling", 0)):
        with pytest.raises(popart.popart_exception, match=f"{name} must be .*; received \\({value}, False"):
            popart.SGD({name: (value, False)})
    with pytest.raises(popart.popart_exception, match="maxNorm must be above 0; received -1"):
        popart.ClipNormSettings.clipAllWeights(-1)
    with pytest.raises(popart.popart_exception, match="must be"):
        popart.SGD({"defaultLearningRate": "fast"})


def test_an_optimizer_has_values_and_limits_for_weights_that_exist() -> None:
    specific = popart.SGD({"defaultLearningRate": (0.1, False)})
    session = session_of(mlp(2), None, specific)
    specific.insertSpecific("w3", {"learningRate": (0.0, False)})
    limited = popart.SGD({}, [popart.ClipNormSettings(["w1", "w3"], 1.0)])
    for call in (lambda: session_of(mlp(2), None, limited), lambda: session.updateOptimizerFromHost(specific)):
        with pytest.raises(popart.popart_exception, match="'w3' is not a weight of this model, as the optimizer"):
            call()


def test_options_are_known_by_name_and_copied_by_a_session() -> None:
    chosen = popart.SessionOptions()
    with pytest.raises(AttributeError, match="no option 'hostAllreduce'; did you mean 'hostAllReduce'"):
        chosen.hostAllreduce = True
    chosen.engineOptions["a"] = "b"
    assert chosen.engineOptions == {"a": "b"} and popart.SessionOptions().engineOptions == {}
    chosen.accumulationReductionType = popart.ReductionType.Mean
    assert chosen.accumulationAndReplicationReductionType is popart.ReductionType.Mean
    twin = copy.deepcopy(chosen)
    twin.engineOptions["c"] = "d"
    assert "c" not in chosen.engineOptions
    for name in ("accumulationFactor", "replicatedGraphCount"):
        with_one = popart.SessionOptions()
        setattr(with_one, name, 2)
        with pytest.raises(popart.popart_exception, match=f"{name} is 2, and enable.* is False"):
            session_of(mlp(2), with_one)


def test_synthetic_data_needs_no_inputs() -> None:
    for mode in (popart.SyntheticDataMode.Zeros, popart.SyntheticDataMode.RandomNormal):
        session = session_of(mlp(2), options(syntheticDataMode=mode), batches=3)
        session.weightsFromHost()
        before = weights_of(session)
        step(session)
        assert (weights_of(session)["w1"] != before["w1"]).any() == (mode is popart.SyntheticDataMode.RandomNormal)


def test_what_a_plan_refuses() -> None:
    model, loss = mlp(2, stages=True)
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})
    manual = options(virtualGraphMode=popart.VirtualGraphMode.Manual)
    unreduced = options(accumulationAndReplicationReductionType=popart.ReductionType.NoReduction)
    flow, sgd = popart.DataFlow(1, {}), popart.ConstSGD(0.1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"userOptions": unreduced}, "ReductionType is Sum or Mean; received <ReductionType.NoReduction"),
        ({"userOptions": options(accumulationFactor=2.5)}, r"must be a whole number of at least 1; received 2\.5"),
        ({"userOptions": manual}, "put on IPU 1, counted from 0, and the device has 1"),
        ({"loss": "MatMul:0"}, r"must be a single number; its shape is \[2, 5\]"),
        ({"loss": "los"}, "'los' is not a tensor of the graph"),
        ({"dataFlow": popart.DataFlow(1, {"nobody": popart.AnchorReturnType("All")})}, "'nobody' is not a tensor"),
        ({"fnModel": b"no model"}, "is not an ONNX model"),
        ({"fnModel": 5}, "a model is bytes"),
        ({"optimizer": 0.1}, "optimizer must be popart.SGD"),
        ({"dataFlow": {}}, "dataFlow must be a popart.DataFlow"),
    ]
    for changed, message in cases:
        given = {"fnModel": model, "dataFlow": flow, "loss": loss, "optimizer": sgd, "deviceInfo": device, **changed}
        with pytest.raises(popart.popart_exception, match=message):
            popart.TrainingSession(**given)
    with pytest.raises(popart.popart_exception, match="accumulated in training only"):
        popart.InferenceSession(model, flow, device, userOptions=options(accumulationFactor=2))


def test_what_popart_has_and_the_software_device_has_not_says_so() -> None:
    with pytest.raises(AttributeError, match="popart has no 'Ir'"):
        _ = popart.Ir


def test_new_hyperparameters_cannot_change_algorithm_or_constants_of_single_weights() -> None:
    adam = {"defaultLearningRate": (0.01, False)}
    changes = [
        (popart.Adam(adam), popart.Adam(adam, popart.AdamMode.AdaMax), r"mode AdamMode\.Adam -> AdamMode\.AdaMax"),
        (
            popart.Adam(adam),
            popart.Adam(adam, weight_decay_mode=popart.WeightDecayMode.L2Regularization),
            "weight_decay",
        ),
        (popart.Adaptive({}), popart.Adaptive({}, popart.AdaptiveMode.AdaGrad), "mode AdaptiveMode.RMSProp -> "),
        (popart.Adaptive({}), popart.Adaptive({}, rmsprop_tf_variant=True), "rmsprop_tf_variant False -> True"),
    ]
    for present, other, message in changes:
        with pytest.raises(popart.popart_exception, match=f"cannot change its algorithm: {message}"):
            session_of(mlp(2), None, present).updateOptimizerFromHost(other)
    specific = popart.SGD(adam)
    specific.insertSpecific("w1", {"learningRate": (0.5, True)})
    with pytest.raises(popart.popart_exception, match=r"cannot change: learningRate of 'w1' 0\.5 -> 0\.01"):
        session_of(mlp(2), None, specific).updateOptimizerFromHost(popart.SGD(adam))


def test_rmsprop_of_tensorflow_follows_its_formula_with_a_changing_rate() -> None:
    for centered in (False, True):
        mode = popart.AdaptiveMode.CenteredRMSProp if centered else popart.AdaptiveMode.RMSProp

        def optimizer(rate: float, mode: Any = mode) -> Any:
            values = {
                "defaultLearningRate": (rate, False),
                "defaultAlpha": 0.9,
                "defaultMomentum": 0.9,
                "defaultEps": 0.1,
            }
            return popart.Adaptive(values, mode, rmsprop_tf_variant=True)

        session = session_of(mlp(2), None, optimizer(0.01), anchors={"Gradient___w1": popart.AnchorReturnType("All")})
        session.weightsFromHost()
        w = weights_of(session)["w1"].astype(np.float64)
        squares, mean, momentum = np.ones_like(w), np.zeros_like(w), np.zeros_like(w)
        for rate in (0.01, 0.01, 0.1, 0.1):
            session.updateOptimizerFromHost(optimizer(rate))
            g = step(session, FEEDS)["Gradient___w1"]
            squares = 0.9 * squares + 0.1 * g * g
            mean = 0.9 * mean + 0.1 * g
            momentum = 0.9 * momentum + rate * g / np.sqrt(squares - centered * mean**2 + 0.1)
            w = w - momentum
        np.testing.assert_allclose(weights_of(session)["w1"], w, rtol=1e-5)
    with pytest.raises(popart.popart_exception, match="received mode AdaGrad"):
        popart.Adaptive({}, popart.AdaptiveMode.AdaGrad, rmsprop_tf_variant=True)


def _gradients(weighted: bool) -> dict[str, Any]:
    """Gradients of sum(|relu(x) * relu(x)|), plus w * x, of tensors before and behind the first weight."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [3]), "x")
    positive = builder.aiOnnx.relu([x], "positive")
    same = builder.aiOnnx.identity([positive], "same")
    total = builder.aiOnnx.mul([same, positive])
    if weighted:
        w = builder.addInitializedInputTensor(np.ones(3, np.float32), "w")
        total = builder.aiOnnx.add([total, builder.aiOnnx.mul([w, x])])
    loss = builder.aiGraphcore.l1loss([total], 1.0, popart.ReductionType.Sum)
    names = [f"Gradient___{name}" for name in (x, positive, same)]
    model = (builder.getModelProto(), loss)
    session = session_of(model, anchors=dict.fromkeys(names, popart.AnchorReturnType("All")))
    if weighted:
        session.weightsFromHost()
    found = step(session, {"x": np.array([1.0, 2.0, 3.0], np.float32)})
    found = step(session, {"x": np.array([1.0, 2.0, 3.0], np.float32)})
    return dict(zip(("x", "positive", "same"), (found[name].tolist() for name in names), strict=True))


def test_gradients_of_inputs_and_of_what_comes_before_weights_are_anchors() -> None:
    assert _gradients(False) == {"x": [2.0, 4.0, 6.0], "positive": [2.0, 4.0, 6.0], "same": [1.0, 2.0, 3.0]}
    weighted = _gradients(True)
    assert weighted["positive"] == [2.0, 4.0, 6.0] and weighted["same"] == [1.0, 2.0, 3.0]
    np.testing.assert_allclose(weighted["x"], np.array([2.0, 4.0, 6.0]) + 1 - 0.1 * np.array([1, 2, 3]), rtol=1e-6)


@pytest.mark.parametrize("of_label", [True, False])
def test_an_anchor_for_a_gradient_that_does_not_exist_is_refused(of_label: bool) -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]), "x")
    label = builder.addInputTensor(popart.TensorInfo("INT32", [2]), "label")
    builder.addInitializedInputTensor(np.ones(3, np.float32), "w")
    loss = builder.aiGraphcore.nllloss([builder.aiOnnx.softmax([builder.aiOnnx.add([x, "w"])]), label])
    name = label if of_label else builder.aiOnnx.softmax([x])
    with pytest.raises(popart.popart_exception, match=f"anchor 'Gradient___{name}' does not exist: no gradient of"):
        session_of((builder.getModelProto(), loss), anchors={f"Gradient___{name}": popart.AnchorReturnType("All")})
