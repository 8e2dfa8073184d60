"""Train a small LeNet on scikit-learn's handwritten digits with PopART, on as many processes as the launcher started.

    python -m khorovod_ipu.examples.popart_digits
    horovodrun -np 2 -H localhost:2 python -m khorovod_ipu.examples.popart_digits --epochs 20

The lines of data-parallel training are marked ``hvd``: a shard of the data for each rank, a learning rate for all
ranks together, gradients that are averaged on the host while backward goes on, the same start on all ranks, evaluation
on rank 0 only.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.popart as hvd
import popart


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, of all ranks (default: 32)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_data(seed: int) -> list[Any]:
    """Return 1,797 real images of 8 x 8 pixels; scikit-learn contains them, nothing is downloaded."""
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16.0).astype(np.float32), digits.target.astype(np.int32)
    return list(train_test_split(images, labels, test_size=0.2, random_state=seed, stratify=labels))


class LeNet:
    """The graph: two convolutions, two layers.

    Attributes:
        model: bytes of the ONNX model.
        image, label, loss, probabilities: ids of tensors.
    """

    def __init__(self, batch: int, random: np.random.RandomState) -> None:
        builder = popart.Builder()
        op = builder.aiOnnx

        def weight(*shape: int, fan_in: int = 1) -> str:
            drawn = random.randn(*shape) * np.sqrt(2 / fan_in) if len(shape) > 1 else np.zeros(shape)
            return builder.addInitializedInputTensor(drawn.astype(np.float32))

        self.image = builder.addInputTensor(popart.TensorInfo("FLOAT", [batch, 1, 8, 8]), "image")
        self.label = builder.addInputTensor(popart.TensorInfo("INT32", [batch]), "label")
        x = op.relu([op.conv([self.image, weight(16, 1, 3, 3, fan_in=9), weight(16)], pads=[1, 1, 1, 1])])
        x = op.relu([op.conv([x, weight(32, 16, 3, 3, fan_in=144), weight(32)], pads=[1, 1, 1, 1])])
        x = op.flatten([op.maxpool([x], 1, [2, 2], strides=[2, 2])[0]])
        x = op.relu([op.gemm([x, weight(512, 64, fan_in=512), weight(64)])])
        logits = op.gemm([x, weight(64, 10, fan_in=64), weight(10)])
        self.probabilities = op.softmax([logits])
        self.loss = builder.aiGraphcore.nllloss([self.probabilities, self.label])
        self.model = builder.getModelProto()


def accuracy(net: LeNet, device: popart.DeviceInfo, weights: str, images: Any, labels: Any, batch: int) -> float:
    """Return the share of right answers of an inference session with the weights of a file."""
    images, labels = images[: len(images) // batch * batch], labels[: len(labels) // batch * batch]
    flow = popart.DataFlow(len(images) // batch, {net.probabilities: popart.AnchorReturnType("All")})
    session = popart.InferenceSession(net.model, flow, device)
    session.resetHostWeights(weights)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({net.image: images}, anchors))
    return float((anchors[net.probabilities].reshape(len(images), 10).argmax(axis=1) == labels).mean())


def train(args: argparse.Namespace) -> None:
    train_images, test_images, train_labels, test_labels = load_data(args.seed)
    batch = args.batch_size // hvd.size()  # hvd: each rank takes its share of a batch
    steps = len(train_images) // args.batch_size
    net = LeNet(batch, np.random.RandomState(args.seed + hvd.rank()))
    options = popart.SessionOptions()
    options.hostAllReduce = True
    optimizer = popart.SGD({"defaultLearningRate": (0.05, False), "defaultMomentum": (0.9, True)})
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})
    flow = popart.DataFlow(steps, {net.loss: popart.AnchorReturnType("All")})
    session = popart.TrainingSession(net.model, flow, net.loss, optimizer, device, userOptions=options)
    session.prepareDevice()
    hvd.DistributedOptimizer(optimizer, session, options).insert_host_allreduce()  # hvd: gradients are averaged
    hvd.broadcast_weights(session, root_rank=0)  # hvd: all ranks begin with the weights of rank 0
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    for epoch in range(args.epochs):
        order = np.random.RandomState(epoch).permutation(len(train_images))[: steps * args.batch_size]
        mine = order.reshape(steps, args.batch_size)[:, hvd.rank() :: hvd.size()][:, :batch].reshape(-1)  # hvd
        session.run(popart.PyStepIO({net.image: train_images[mine], net.label: train_labels[mine]}, anchors))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  training loss {anchors[net.loss].mean():.4f}")
    if hvd.rank() == 0:  # hvd: one rank is enough, the weights are the same on all
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "digits.onnx")
            session.modelToHost(path)
            result = accuracy(LeNet(batch, np.random.RandomState(0)), device, path, test_images, test_labels, batch)
        print(f"test accuracy {result:.2%} on {hvd.size()} process(es)")


if __name__ == "__main__":
    arguments = parse_args()
    hvd.init()
    train(arguments)
    hvd.shutdown()
