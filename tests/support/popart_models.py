"""Models and runs of PopART that several tests use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import popart
from khorovod_ipu.capsules import array_behind

__all__ = ["chain", "connect", "mlp", "options", "session_of", "step", "weights_of"]


def options(**chosen: Any) -> popart.SessionOptions:
    """Options with these values; numbers above 1 switch on what they count."""
    made = popart.SessionOptions()
    for name, value in chosen.items():
        setattr(made, name, value)
    made.enableReplicatedGraphs = made.replicatedGraphCount > 1
    made.enableGradientAccumulation = made.accumulationFactor > 1
    return made


def chain(factor: float) -> tuple[bytes, str]:
    """The model of PopART's own tests: ones A[7x6] B[6x8] C[8x7] D[7x8], the sum of ((A@B)@C)@D times a factor."""
    builder = popart.Builder()
    shapes = {"A": (7, 6), "B": (6, 8), "C": (8, 7), "D": (7, 8)}
    a, *others = (builder.addInitializedInputTensor(np.ones(s, np.float32), name) for name, s in shapes.items())
    for other in others:
        a = builder.aiOnnx.matmul([a, other])
    loss = builder.aiGraphcore.l1loss([a], factor, popart.ReductionType.Sum)
    return builder.getModelProto(), loss


def mlp(rows: int, seed: int = 0, mean: bool = True, stages: bool = False) -> tuple[bytes, str]:
    """Two layers from 4 to 3 classes over a batch of ``rows``, with a cross entropy; inputs are ``x`` and ``label``."""
    random = np.random.RandomState(seed)
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [rows, 4]), "x")
    label = builder.addInputTensor(popart.TensorInfo("INT32", [rows]), "label")
    w1 = builder.addInitializedInputTensor(random.randn(4, 5).astype(np.float32), "w1")
    w2 = builder.addInitializedInputTensor(random.randn(5, 3).astype(np.float32), "w2")
    with builder.pipelineStage(0), builder.virtualGraph(0):
        h = builder.aiOnnx.tanh([builder.aiOnnx.matmul([x, w1])])
    with builder.pipelineStage(int(stages)), builder.virtualGraph(int(stages)):
        probabilities = builder.aiOnnx.softmax([builder.aiOnnx.matmul([h, w2])])
        how = popart.ReductionType.Mean if mean else popart.ReductionType.Sum
        loss = builder.aiGraphcore.nllloss([probabilities, label], how)
    return builder.getModelProto(), loss


def session_of(
    model: tuple[bytes, str],
    chosen: popart.SessionOptions | None = None,
    optimizer: Any = None,
    batches: int = 1,
    anchors: Mapping[str, Any] | None = None,
) -> Any:
    """A training session on a device of four IPUs, prepared."""
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 4})
    session = popart.TrainingSession(
        model[0],
        popart.DataFlow(batches, dict(anchors or {})),
        model[1],
        optimizer or popart.ConstSGD(0.1),
        device,
        userOptions=chosen or popart.SessionOptions(),
    )
    session.prepareDevice()
    return session


def step(session: Any, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One ``run()`` after which the host has the weights; returns the anchors."""
    arrays: dict[str, Any] = session.initAnchorArrays()
    session.run(popart.PyStepIO(dict(inputs or {}), arrays))
    session.weightsToHost()
    return arrays


def weights_of(session: Any) -> dict[str, Any]:
    """The weights of the host, by id."""
    arrays = {n: np.empty(i.shape(), i.data_type_lcase()) for n in session.getWeightIds() for i in [session.getInfo(n)]}
    session.readWeights(popart.PyWeightsIO(arrays))
    return arrays


def connect(
    session: Any, answer: Callable[[str, Any], Any], replicas: int = 1
) -> tuple[dict[str, Any], list[tuple[str, str, int]]]:
    """Put a function behind all streams.

    Args:
        session: prepared.
        answer: from the weight's id and the stored gradient to what is loaded.
        replicas: of the session.

    Returns:
        The stored gradients by weight, and what was called, as (kind, weight, replica), as it comes.
    """
    gradients: dict[str, Any] = {}
    calls: list[tuple[str, str, int]] = []

    def callback(kind: str, weight: str, replica: int) -> Callable[[Any], None]:
        info = session.getInfo(weight)

        def called(pointer: Any) -> None:
            calls.append((kind, weight, replica))
            array = array_behind(pointer, info.shape(), info.data_type_lcase())
            if kind == "gradientStore":
                gradients[weight] = array.copy()
            else:
                array[...] = answer(weight, gradients[weight])

        return called

    for handle in session.getHostReduceStreamIds():
        kind, _, name = handle.partition("__")
        weight = name.removeprefix("Final").removeprefix("Reduced").removeprefix("Gradient___")
        for replica in range(replicas if kind == "gradientStore" else 1):
            session.connectStreamToCallback(handle, callback(kind, weight, replica), replica)
    return gradients, calls
