"""The example, and the calls of the vendors' public examples in their order, with what is odd about them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import run_ranks
from sources import ROOT

import popart
from scripts import run_script


@pytest.mark.slow
@pytest.mark.parametrize("np", [1, 3])
def test_digits_reach_95_percent_on_any_number_of_ranks(np: int, tmp_path: Path) -> None:
    script = ROOT / "khorovod-ipu" / "src" / "khorovod_ipu" / "examples" / "popart_digits.py"
    code, output = run_script(script, np, tmp_path, "popart", ["--epochs", "5"])
    assert code == 0, output
    [accuracy] = re.findall(r"test accuracy (\d+\.\d+)%", output)
    assert float(accuracy) >= 95.0, output


def _simple_distributed_training() -> tuple[Any, Any]:
    """In the order of ``simple_distributed_training.py``: init() comes after the session."""
    import horovod.popart as hvd

    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo(np.float32, [1, 16]))
    label = builder.addInputTensor(popart.TensorInfo("INT32", [1]))
    random = np.random.RandomState(0)
    w = builder.addInitializedInputTensor(random.normal(0, 1, [16, 10]).astype(np.float32))
    b = builder.addInitializedInputTensor(np.zeros([1, 10], np.float32))
    assert (x, label, w, b) == ("input", "input/1", "init_input", "init_input/1")
    logits = builder.aiOnnx.add([builder.aiOnnx.matmul([x, w]), b])
    unused = builder.aiOnnx.softmax([logits])
    # Of raw logits, as the example has it: the numbers diverge, and nobody minds.
    loss = builder.aiGraphcore.nllloss([logits, label])
    device = popart.DeviceManager().createIpuModelDevice({"compileIPUCode": True, "numIPUs": 1, "tilesPerIPU": 5})
    options = popart.SessionOptions()
    options.hostAllReduce = True
    optimizer = popart.SGD({"defaultLearningRate": (0.1, False)})
    session = popart.TrainingSession(
        fnModel=builder.getModelProto(), loss=loss, deviceInfo=device, optimizer=optimizer,
        dataFlow=popart.DataFlow(32, {loss: popart.AnchorReturnType("All")}), userOptions=options,
    )  # fmt: skip
    session.prepareDevice()
    session.setRandomSeed(42)
    anchors = session.initAnchorArrays()
    hvd.init()
    hvd.DistributedOptimizer(optimizer, session, options).insert_host_allreduce()
    hvd.broadcast_weights(session, root_rank=0)
    session.weightsFromHost()
    random = np.random.RandomState(hvd.rank())
    for _ in range(2):
        # Of another shape than declared; only the number of elements counts.
        feeds = {x: random.rand(32, 1, 16).astype(np.float32), label: random.randint(0, 10, (32, 1, 1), np.int32)}
        session.run(popart.PyStepIO(feeds, anchors))
    with pytest.raises(popart.popart_exception, match=f"{unused!r} is not a tensor of this session"):
        session.getInfo(unused)
    session.weightsToHost()
    weights = {w: np.empty((16, 10), np.float32)}
    session.readWeights(popart.PyWeightsIO(weights))
    return anchors[loss], weights[w]


def test_the_calls_of_simple_distributed_training() -> None:
    results = run_ranks(2, _simple_distributed_training, init=False, framework="popart")
    for losses, weights in results:
        assert losses.shape == (32,)
        assert (weights == results[0][1]).all(), "the ranks have different bits"


def _horovod_popart_mnist(folder: str, mode: str) -> str:
    """In the order of ``horovod_popart_mnist.py``, on random images; ``mode`` is one of its options."""
    import horovod.popart as hvd

    hvd.init()
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 20]))
    w, b = (builder.addInitializedInputTensor(np.random.RandomState(hvd.rank()).randn(*shape).astype(np.float32))
            for shape in ((20, 3), (3,)))  # fmt: skip
    output = builder.aiOnnx.add([builder.aiOnnx.matmul([x, w]), b], "output")
    builder.addOutputTensor(output)
    probabilities = builder.aiOnnx.softmax([output])
    label = builder.addInputTensor(popart.TensorInfo("INT32", [4]))
    loss = builder.aiGraphcore.nllloss([probabilities, label], popart.ReductionType.Sum, debugContext="nll")
    proto = builder.getModelProto()

    options = popart.SessionOptions()
    options.hostAllReduce = True
    options.constantWeights = False
    options.instrumentWithHardwareCycleCounter = True
    options.engineOptions["debug.allowOutOfMemory"] = "true"
    if mode == "pipeline":
        options.virtualGraphMode, options.enablePipelining = popart.VirtualGraphMode.Auto, True
    if mode == "synthetic":
        options.syntheticDataMode = popart.SyntheticDataMode.RandomNormal
    popart.getLogger("ir").setLevel("TRACE")
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 2})
    optimizer = popart.ConstSGD(0.01 * hvd.size())
    flow = popart.DataFlow(5, {loss: popart.AnchorReturnType("ALL"), output: popart.AnchorReturnType("ALL")})
    training = popart.TrainingSession(fnModel=proto, loss=loss, deviceInfo=device, optimizer=optimizer, dataFlow=flow,
                                      userOptions=options)  # fmt: skip
    flow = popart.DataFlow(5, {output: popart.AnchorReturnType("ALL")})
    inference = popart.InferenceSession(fnModel=proto, deviceInfo=device, dataFlow=flow, userOptions=options)
    popart.getLogger("ir").setLevel("OFF")
    training.prepareDevice()
    inference.prepareDevice()
    hvd.DistributedOptimizer(optimizer, training, options).insert_host_allreduce()
    random = np.random.RandomState(5)
    images = random.randn(20 * hvd.size(), 20).astype(np.float32)
    labels = images[:, :3].argmax(axis=1).astype(np.int32)
    mine = slice(hvd.rank(), None, hvd.size())
    anchors, file = training.initAnchorArrays(), str(Path(folder) / "mnist.onnx")
    for _ in range(60):
        hvd.broadcast_weights(training, root_rank=0)
        training.weightsFromHost()
        feeds = {x: np.ascontiguousarray(images[mine]), label: np.ascontiguousarray(labels[mine])}
        training.run(popart.PyStepIO(feeds, anchors), "Epoch")
        training.weightsToHost()
    assert training.getCycleCount() > 0
    if hvd.rank() != 0:
        return ""
    training.modelToHost(file)
    inference.resetHostWeights(file)
    inference.weightsFromHost()
    found = inference.initAnchorArrays()
    inference.run(popart.PyStepIO({x: images[:20].reshape(5, 4, 20)}, found), "Inference")
    return f"Accuracy={(found[output].reshape(20, 3).argmax(axis=1) == labels[:20]).mean():.2%}"


@pytest.mark.parametrize("mode", ["plain", "pipeline", "synthetic"])
def test_the_calls_of_the_mnist_example(mode: str, tmp_path: Path) -> None:
    text, _ = run_ranks(2, _horovod_popart_mnist, str(tmp_path), mode, framework="popart")
    assert re.fullmatch(r"Accuracy=\d+\.\d\d%", text)
    if mode != "synthetic":
        assert float(text[9:-1]) >= 80


def test_the_log_tells_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("popart")
    try:
        popart.getLogger("ir").setLevel("TRACE")
        run_builder = popart.Builder()
        w = run_builder.addInitializedInputTensor(np.ones(2, np.float32), "w")
        loss = run_builder.aiGraphcore.l1loss([w], 1.0)
        options = popart.SessionOptions()
        options.hostAllReduce = True
        popart.TrainingSession(run_builder.getModelProto(), popart.DataFlow(1, {}), loss, popart.ConstSGD(0.1),
                               popart.DeviceManager().createCpuDevice(), userOptions=options)  # fmt: skip
        assert "GradCopyToHost hostReduceGradCopy___d2h__w" in capsys.readouterr().err
        with pytest.raises(popart.popart_exception, match="level 'LOUD' does not exist"):
            popart.getLogger("ir").setLevel("LOUD")
    finally:
        logger.handlers.clear()
        logging.getLogger("popart.ir").setLevel(logging.NOTSET)
