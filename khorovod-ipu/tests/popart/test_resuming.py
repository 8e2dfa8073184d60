"""Training goes on from a file as if it had never stopped: weights, and the optimizer's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import run_ranks
from popart_models import mlp, options, session_of, step, weights_of

import popart

RATE = {"defaultLearningRate": (0.1, False)}
MODES = popart.AdaptiveMode
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda: popart.SGD({**RATE, "defaultMomentum": (0.9, True)}),
    "adam": lambda: popart.Adam(RATE),
    "lamb": lambda: popart.Adam(RATE, mode=popart.AdamMode.Lamb),
    "rmsprop": lambda: popart.Adaptive({**RATE, "defaultMomentum": (0.5, True)}, MODES.CenteredRMSProp),
    "tf": lambda: popart.Adaptive(RATE, MODES.RMSProp, rmsprop_tf_variant=True),
    "adadelta": lambda: popart.Adaptive(RATE, MODES.AdaDelta),
}


def feeds(number: int) -> dict[str, Any]:
    random = np.random.RandomState(number)
    return {"x": random.randn(8, 4).astype(np.float32), "label": random.randint(0, 3, 8).astype(np.int32)}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_session_of_the_file_or_reset_to_it_goes_on(kind: str, tmp_path: Path) -> None:
    path, (model, loss), make = str(tmp_path / "model.onnx"), mlp(8), OPTIMIZERS[kind]
    session = session_of((model, loss), None, make())
    session.weightsFromHost()
    for number in range(3):
        step(session, feeds(number))
    session.modelToHost(path)
    for number in range(3, 6):
        step(session, feeds(number))
    new, reset = session_of((path, loss), None, make()), session_of((model, loss), None, make())
    reset.resetHostWeights(path)
    for other in (new, reset):
        other.weightsFromHost()
        for number in range(3, 6):
            step(other, feeds(number))
        found, expected = weights_of(other), weights_of(session)
        assert found.keys() == expected.keys() and len(found) > 2
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


def test_the_state_of_another_optimizer_is_none_of_ours(tmp_path: Path) -> None:
    path, (model, loss) = str(tmp_path / "model.onnx"), mlp(8)
    adam = session_of((model, loss), None, OPTIMIZERS["adam"]())
    adam.weightsFromHost()
    step(adam, feeds(0))
    adam.modelToHost(path)
    weights = {name: array for name, array in weights_of(adam).items() if name in ("w1", "w2")}
    new, reset = (session_of((m, loss), None, OPTIMIZERS["rmsprop"]()) for m in (path, model))
    reset.resetHostWeights(path)
    fresh = session_of((model, loss), None, OPTIMIZERS["rmsprop"]())
    fresh.writeWeights(popart.PyWeightsIO(weights))
    for session in (fresh, new, reset):
        session.weightsFromHost()
        step(session, feeds(1))
        for name in weights:
            np.testing.assert_array_equal(weights_of(session)[name], weights_of(fresh)[name])


def test_a_weight_of_another_shape_is_refused_though_it_has_as_many_elements() -> None:
    builder = popart.Builder()
    for name, shape in (("w1", (5, 4)), ("w2", (5, 3))):
        builder.addInitializedInputTensor(np.zeros(shape, np.float32), name)
    with pytest.raises(popart.popart_exception, match=r"'w1' is float32 \[4, 5\]; received float32 \[5, 4\]"):
        session_of(mlp(8)).resetHostWeights(builder.getModelProto())


def _resumed(path: str) -> Any:
    import horovod.popart as hvd

    chosen, optimizer = options(hostAllReduce=True), OPTIMIZERS["momentum"]()
    session = session_of(mlp(8), chosen, optimizer)
    if hvd.rank() == 0:
        session.resetHostWeights(path)
    hvd.DistributedOptimizer(optimizer, session, chosen).insert_host_allreduce()
    hvd.broadcast_weights(session)
    session.weightsFromHost()
    step(session, feeds(1))
    return weights_of(session)


def test_a_file_that_one_rank_reads_is_enough(tmp_path: Path) -> None:
    path, model = str(tmp_path / "model.onnx"), mlp(8)
    session = session_of(model, None, OPTIMIZERS["momentum"]())
    session.weightsFromHost()
    step(session, feeds(0))
    session.modelToHost(path)
    step(session, feeds(1))
    for found in run_ranks(2, _resumed, path, framework="popart"):
        for name, array in weights_of(session).items():
            np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7)


def test_a_builder_of_the_file_has_the_weights_alone(tmp_path: Path) -> None:
    path, model = str(tmp_path / "model.onnx"), mlp(8)
    session_of(model, None, OPTIMIZERS["adam"]()).modelToHost(path)
    builder = popart.Builder(path)
    assert builder.getTrainableTensorIds() == ["w1", "w2"]
    again = session_of((builder.getModelProto(), model[1]), None, OPTIMIZERS["adam"]())
    assert "OptimizerState___Adam.steps___w1" in weights_of(again)
