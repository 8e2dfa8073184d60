"""Host allreduce: PopART's numbers to their digits, the order of callbacks, and what cannot be combined."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from popart_models import chain, connect, mlp, options, session_of, step, weights_of

import popart

IDENTITY = lambda weight, gradient: gradient  # noqa: E731


def firsts(arrays: dict[str, Any]) -> dict[str, float]:
    """One number for each array, which is the same everywhere in it."""
    # But for the last bit: some processors' kernels add up the columns at the edge in another order.
    assert all(np.allclose(array, array.flat[0], rtol=1e-6, atol=0) for array in arrays.values())
    return {name: float(array.flat[0]) for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("rate", "replicas", "host", "expected"),
    [
        (1.0, 1, IDENTITY, {"A": -447, "B": -391, "C": -335, "D": -335}),
        (0.1, 2, lambda weight, gradient: gradient / 2, {"A": -43.8, "B": -38.2, "C": -32.6, "D": -32.6}),
    ],
)
def test_gradients_go_up_and_come_down(rate: float, replicas: int, host: Any, expected: dict[str, float]) -> None:
    chosen = options(hostAllReduce=True, replicatedGraphCount=replicas)
    session = session_of(chain(1.0), chosen, popart.ConstSGD(rate))
    connect(session, host, replicas)
    session.weightsFromHost()
    step(session)
    assert firsts(weights_of(session)) == pytest.approx(expected, rel=1e-6)


def test_weights_come_down_with_host_weight_update() -> None:
    chosen = options(hostAllReduce=True, hostWeightUpdate=True, replicatedGraphCount=2)
    session = session_of(chain(0.1), chosen, popart.ConstSGD(0.01))
    gradients, calls = connect(session, lambda weight, gradient: ord(weight), replicas=2)
    session.weightsFromHost()
    step(session)
    assert firsts(gradients) == pytest.approx({"A": 89.6, "B": 78.4, "C": 67.2, "D": 67.2}, rel=1e-6)
    assert firsts(weights_of(session)) == {name: float(ord(name)) for name in "ABCD"}
    assert {kind for kind, _, _ in calls} == {"gradientStore", "weightLoad"}


@pytest.mark.parametrize("pipelining", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_identity_is_as_good_as_no_host_reduction(pipelining: bool, accumulation: int, momentum: float) -> None:
    random = np.random.RandomState(1)
    count = 2 * accumulation * 3
    inputs = {"x": random.randn(count, 2, 4).astype(np.float32), "label": random.randint(0, 3, (count, 2), np.int32)}
    found = []
    for reduced in (False, True):
        chosen = options(hostAllReduce=reduced, accumulationFactor=accumulation, enablePipelining=pipelining,
                         replicatedGraphCount=2, virtualGraphMode=popart.VirtualGraphMode.Manual)  # fmt: skip
        optimizer = popart.SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (momentum, True)})
        session = session_of(mlp(2, stages=True), chosen, optimizer, batches=3)
        connect(session, IDENTITY, replicas=2)
        session.weightsFromHost()
        step(session, inputs)
        found.append(weights_of(session))
    for name, weight in found[0].items():
        np.testing.assert_array_equal(weight, found[1][name])


def test_every_store_comes_before_every_load_once_per_step_and_replica() -> None:
    session = session_of(mlp(2), options(hostAllReduce=True, replicatedGraphCount=2, accumulationFactor=3), batches=2)
    _, calls = connect(session, IDENTITY, replicas=2)
    session.weightsFromHost()
    count = 2 * 3 * 2
    step(session, {"x": np.ones((count, 2, 4), np.float32), "label": np.zeros((count, 2), np.int32)})
    stores = [("gradientStore", weight, replica) for weight in ("w2", "w1") for replica in (0, 1)]
    loads = [("gradientLoad", weight, 0) for weight in ("w2", "w1")]
    assert calls == (stores + loads) * 2


def test_the_schedule_says_the_same() -> None:
    session = session_of(mlp(2), options(hostAllReduce=True))
    graph = json.loads(session._serializeIr(popart.IrSerializationFormat.JSON))["maingraph"]
    types = [entry["type"] for entry in graph]
    ups, downs = (
        [i for i, e in enumerate(graph) if e["name"].startswith(popart.hostReduceGradCopyPrefix() + way)]
        for way in ("d2h", "h2d")
    )
    assert len(ups) == len(downs) == 2
    assert max(ups) < min(downs)
    assert types[ups[0] + 1].endswith("Grad"), "backward goes on after a store"


def test_the_streams_are_two_for_each_weight_and_there_after_prepare_device() -> None:
    device = popart.DeviceManager().createCpuDevice()
    model, loss = mlp(2)
    session = popart.TrainingSession(model, popart.DataFlow(1, {}), loss, popart.ConstSGD(0.1), device,
                                     userOptions=options(hostAllReduce=True, accumulationFactor=2))  # fmt: skip
    assert session.getHostReduceStreamIds() == []
    with pytest.raises(popart.popart_exception, match=r"prepareDevice\(\) before"):
        session.connectStreamToCallback("gradientStore__Gradient___w1", print, 0)
    session.prepareDevice()
    kinds = ("gradientStore__FinalReducedGradient___", "gradientLoad__FinalReducedGradient___")
    assert sorted(session.getHostReduceStreamIds()) == sorted(
        kind + weight for kind in kinds for weight in ("w1", "w2")
    )


def test_a_weight_without_a_gradient_in_a_step_is_reduced_as_zeros() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2], "x")
    w = builder.addInitializedInputTensor(np.ones(2, np.float32), "w")
    used = builder.aiOnnx.where([builder.aiOnnx.less([x, builder.aiOnnx.constant(np.zeros(2, np.float32))]), w, x])
    loss = builder.aiGraphcore.identityloss([used], popart.ReductionType.Sum)
    session = session_of((builder.getModelProto(), loss), options(hostAllReduce=True))
    gradients, calls = connect(session, IDENTITY)
    session.weightsFromHost()
    step(session, {"x": np.ones(2, np.float32)})
    assert [kind for kind, _, _ in calls] == ["gradientStore", "gradientLoad"]
    assert (gradients["w"] == 0).all() and (weights_of(session)["w"] == 1).all()


def test_a_step_that_breaks_off_in_a_callback_changes_nothing_and_the_next_one_works() -> None:
    session = session_of(chain(1.0), options(hostAllReduce=True), popart.ConstSGD(1.0))
    broken = {"C"}

    def answer(weight: str, gradient: Any) -> Any:
        if weight in broken:
            raise ZeroDivisionError(weight)
        return gradient

    connect(session, answer)
    session.weightsFromHost()
    with pytest.raises(ZeroDivisionError, match="C"):
        session.run(popart.PyStepIO({}, {}))
    session.weightsToHost()
    assert firsts(weights_of(session)) == dict.fromkeys("ABCD", 1)
    broken.clear()
    step(session)
    assert firsts(weights_of(session)) == {"A": -447, "B": -391, "C": -335, "D": -335}


MOMENTUM = popart.SGD({"defaultMomentum": (0.9, True)})
CLIPPING = popart.SGD({}, [popart.ClipNormSettings.clipAllWeights(1.0)])
SEPARATE = popart.SGD({}, accumulatorAndMomentum=popart.SGDAccumulatorAndMomentum.Separate)


@pytest.mark.parametrize(
    ("chosen", "optimizer", "message"),
    [
        ({"hostWeightUpdate": True, "hostAllReduce": False}, None, "hostWeightUpdate needs hostAllReduce"),
        ({"hostWeightUpdate": True, "enablePipelining": True}, None, "hostWeightUpdate cannot .* enablePipelining"),
        ({"hostWeightUpdate": True, "accumulationFactor": 2}, None, "cannot .* enableGradientAccumulation"),
        ({"hostAllReduceRemoteBuffer": True}, None, "hostAllReduceRemoteBuffer is not imitated"),
        ({"hostWeightUpdate": True}, MOMENTUM, "hostWeightUpdate cannot .* momentum"),
        ({"hostWeightUpdate": True}, CLIPPING, "hostWeightUpdate cannot .* clip_norm_settings"),
        ({"mergeVarUpdate": popart.MergeVarUpdateType.All}, None, "hostAllReduce cannot .* mergeVarUpdate"),
        ({"enableDistributedReplicatedGraphs": True}, None, "hostAllReduce cannot .* over the processes as well"),
        ({}, popart.Adam({}), "Adam PopART trained each process by itself"),
        ({}, popart.Adaptive({}), "Adaptive PopART trained each process by itself"),
        ({}, SEPARATE, "separate accumulator and momentum PopART trained each"),
    ],
)
def test_what_cannot_be_combined_is_refused(chosen: dict[str, Any], optimizer: Any, message: str) -> None:
    with pytest.raises(popart.popart_exception, match=message):
        session_of(chain(1.0), options(**{"hostAllReduce": True, **chosen}), optimizer)


def test_a_stream_with_nobody_behind_it_is_refused_before_anything_runs() -> None:
    session = session_of(chain(1.0), options(hostAllReduce=True))
    session.weightsFromHost()
    with pytest.raises(
        popart.popart_exception, match=r"8 of the host reduction's 8 streams.*insert_host_allreduce\(\)"
    ):
        session.run(popart.PyStepIO({}, {}))
    with pytest.raises(popart.popart_exception, match="did you mean 'gradientStore__Gradient___A'"):
        session.connectStreamToCallback("gradientStore__Gradient__A", print, 0)
    with pytest.raises(popart.popart_exception, match="has no replica 1; this session has 1"):
        session.connectStreamToCallback("gradientStore__Gradient___A", print, 1)
    with pytest.raises(popart.popart_exception, match="has no replica 1; one load serves all"):
        session.connectStreamToCallback("gradientLoad__Gradient___A", print, 1)


def test_inference_passes_over_host_reduction() -> None:
    model, _ = mlp(2)
    device = popart.DeviceManager().acquireAvailableDevice(1)
    flow = popart.DataFlow(1, {"Softmax:0": popart.AnchorReturnType("All")})
    chosen = options(hostAllReduce=True)
    session = popart.InferenceSession(model, flow, device, userOptions=chosen)
    session.prepareDevice()
    assert session.getHostReduceStreamIds() == []
    found = step(session, {"x": np.ones((2, 4), np.float32)})
    np.testing.assert_allclose(found["Softmax:0"].sum(axis=1), 1.0, rtol=1e-6)
