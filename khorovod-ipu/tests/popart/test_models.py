"""Whole networks: a LeNet, a ResNet block and a small transformer are real ONNX models, and learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from popart_models import mlp, options, session_of, step, weights_of

import popart


class Net:
    """A builder, and weights that are drawn for it."""

    def __init__(self, *shape: int, integers: bool = False) -> None:
        self.random = np.random.RandomState(0)
        self.builder = popart.Builder()
        self.op, self.own = self.builder.aiOnnx, self.builder.aiGraphcore
        self.x = self.builder.addInputTensor(popart.TensorInfo("INT32" if integers else "FLOAT", shape), "x")

    def weight(self, *shape: int, value: float | None = None) -> str:
        spread = 1 / np.sqrt(np.prod(shape[1:]) if len(shape) > 2 else shape[0])
        drawn = self.random.randn(*shape) * spread if value is None else np.full(shape, value)
        return str(self.builder.addInitializedInputTensor(drawn.astype(np.float32)))

    def reshape(self, x: str, *shape: int) -> str:
        return str(self.op.reshape([x, self.op.constant(np.array(shape, np.int64))]))

    def dense(self, x: str, i: int, o: int) -> str:
        return str(self.op.add([self.op.matmul([x, self.weight(i, o)]), self.weight(o, value=0.0)]))


def lenet() -> tuple[Net, str, int]:
    net = Net(4, 1, 8, 8)
    h = net.op.relu([net.op.conv([net.x, net.weight(6, 1, 3, 3), net.weight(6, value=0.0)], pads=[1, 1, 1, 1])])
    h = net.op.maxpool([h], 1, [2, 2], strides=[2, 2])[0]
    h = net.op.relu([net.op.conv([h, net.weight(8, 6, 3, 3)])])
    h = net.op.flatten([net.op.averagepool([h], [2, 2])], 1)
    h = net.op.tanh([net.op.gemm([h, net.weight(8, 16), net.weight(16, value=0.0)])])
    return net, net.dense(h, 16, 3), 3


def resnet_block() -> tuple[Net, str, int]:
    net = Net(4, 3, 6, 6)

    def normal(x: str, channels: int) -> str:
        statistics = [net.weight(channels, value=value) for value in (1.0, 0.0, 0.0, 1.0)]
        return str(net.op.batchnormalization([x, *statistics], 5, epsilon=1e-5, momentum=0.9)[0])

    h = normal(net.op.conv([net.x, net.weight(4, 3, 3, 3)], pads=[1, 1, 1, 1], strides=[2, 2]), 4)
    h = normal(net.op.conv([net.op.relu([h]), net.weight(4, 4, 3, 3)], pads=[1, 1, 1, 1]), 4)
    short = normal(net.op.conv([net.x, net.weight(4, 3, 1, 1)], strides=[2, 2]), 4)
    h = net.op.globalaveragepool([net.op.relu([net.op.add([h, short])])])
    return net, net.dense(net.reshape(h, 4, 4), 4, 3), 3


def transformer() -> tuple[Net, str, int]:
    length, width, heads = 5, 8, 2
    net = Net(2, length, integers=True)

    def normal(x: str) -> str:
        rows = net.reshape(x, 2 * length, width)
        ones, zeros = net.weight(width, value=1.0), net.weight(width, value=0.0)
        return net.reshape(net.own.groupnormalization([rows, ones, zeros], 1)[0], 2, length, width)

    h = net.op.add([net.op.gather([net.weight(11, width), net.x]), net.weight(1, length, width)])
    q, k, v = (
        net.op.transpose([net.reshape(part, 2, length, heads, width // heads)], [0, 2, 1, 3])
        for part in net.op.split([net.dense(normal(h), width, 3 * width)], 3, axis=2)
    )
    scores = net.op.matmul([q, net.op.transpose([k], [0, 1, 3, 2])])
    scores = net.op.div([scores, net.op.constant(np.float32(np.sqrt(width / heads)))])
    mask = np.triu(np.full((length, length), -1e4, np.float32), 1)
    attention = net.op.softmax([net.op.add([scores, net.op.constant(mask)])], axis=3)
    mixed = net.reshape(net.op.transpose([net.op.matmul([attention, v])], [0, 2, 1, 3]), 2, length, width)
    h = net.op.add([h, net.dense(net.op.dropout([mixed], 1, 0.1)[0], width, width)])
    h = net.op.add([h, net.dense(net.own.gelu([net.dense(normal(h), width, 16)]), 16, width)])
    return net, net.dense(net.reshape(h, 2 * length, width), width, 11), 11


def with_loss(net: Net, logits: str, classes: int) -> tuple[bytes, str, dict[str, Any]]:
    """The model, its loss, and inputs."""
    rows = net.builder.getTensorShape(logits)[0]
    label = net.builder.addInputTensor("INT32", [rows], "label")
    loss = net.own.nllloss([net.op.softmax([logits]), label])
    shape = net.builder.getTensorShape(net.x)
    whole = net.builder.getTensorDtypeString(net.x) == "int32"
    x = net.random.randint(0, 11, shape).astype(np.int32) if whole else net.random.randn(*shape).astype(np.float32)
    return net.builder.getModelProto(), loss, {"x": x, "label": net.random.randint(0, classes, rows).astype(np.int32)}


@pytest.mark.parametrize("network", [lenet, resnet_block, transformer])
def test_a_network_learns_a_batch_by_heart_and_only_statistics_are_not_trained(network: Callable[[], Any]) -> None:
    model, loss, inputs = with_loss(*network())
    optimizer = popart.SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (0.9, True)})
    session = session_of((model, loss), None, optimizer, batches=40, anchors={loss: popart.AnchorReturnType("All")})
    session.setRandomSeed(1)
    session.weightsFromHost()
    before = weights_of(session)
    repeated = {name: np.stack([array] * 40) for name, array in inputs.items()}
    losses = step(session, repeated)[loss]
    assert losses[-1] < 0.6 * losses[0], losses
    unchanged = [name for name, array in weights_of(session).items() if (array == before[name]).all()]
    assert not unchanged


def test_the_model_is_onnx_that_others_read_and_compute_alike() -> None:
    net, logits, _ = lenet()
    net.builder.addOutputTensor(logits)
    proto = onnx.load_model_from_string(net.builder.getModelProto())
    onnx.checker.check_model(proto, full_check=True)
    assert {opset.domain: opset.version for opset in proto.opset_import} == {"": 10, "ai.graphcore": 1}
    x = net.random.randn(*net.builder.getTensorShape("x")).astype(np.float32)
    flow = popart.DataFlow(1, {logits: popart.AnchorReturnType("All")})
    session = popart.InferenceSession(net.builder.getModelProto(), flow, popart.DeviceManager().createCpuDevice())
    session.prepareDevice()
    [expected] = ReferenceEvaluator(proto).run([logits], {"x": x})
    np.testing.assert_allclose(step(session, {"x": x})[logits], expected, rtol=1e-4, atol=1e-5)


def test_replicas_and_micro_batches_are_the_whole_batch() -> None:
    random = np.random.RandomState(2)
    found = []
    for rows, parts in ((12, {}), (2, {"replicatedGraphCount": 2, "accumulationFactor": 3})):
        net = Net(rows, 6)
        net.random = np.random.RandomState(5)
        model, loss, _ = with_loss(net, net.dense(net.op.tanh([net.dense(net.x, 6, 5)]), 5, 3), 3)
        random.seed(2)
        inputs = {"x": random.randn(12, 6).astype(np.float32), "label": random.randint(0, 3, 12).astype(np.int32)}
        chosen = options(accumulationAndReplicationReductionType=popart.ReductionType.Mean, **parts)
        session = session_of((model, loss), chosen, popart.ConstSGD(0.5))
        session.weightsFromHost()
        step(session, inputs)
        found.append(weights_of(session))
    for name, weight in found[0].items():
        np.testing.assert_allclose(weight, found[1][name], rtol=1e-5, atol=1e-6)


def test_groups_of_channels_that_are_not_side_by_side_are_refused() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 4, 3]), "x")
    ones = builder.addInitializedInputTensor(np.ones(4, np.float32))
    y, *_ = builder.aiGraphcore.groupnormalization([x, ones, ones], 2)
    flow = popart.DataFlow(1, {y: popart.AnchorReturnType("All")})
    device = popart.DeviceManager().createCpuDevice()
    strided = options(groupNormStridedChannelGrouping=True)
    with pytest.raises(popart.popart_exception, match="groupNormStridedChannelGrouping=True is not imitated"):
        popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=strided)
    session_of(mlp(2), strided)  # no groups at all
