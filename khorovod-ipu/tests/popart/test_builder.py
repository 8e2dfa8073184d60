"""The builder: ids, shapes, scopes, and errors at the call that is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from popart_models import session_of, step

import popart


def test_ids_are_those_of_popart() -> None:
    builder = popart.Builder()
    info = popart.TensorInfo("FLOAT", [2, 2])
    assert [builder.addInputTensor(info) for _ in range(3)] == ["input", "input/1", "input/2"]
    assert builder.addInputTensor("FLOAT16", [1], "half") == "half"
    assert builder.addInputTensor("INT32", [1], debugPrefix="old") == "old"
    assert [builder.addInitializedInputTensor(np.ones(2)) for _ in range(2)] == ["init_input", "init_input/1"]
    assert [builder.aiOnnx.relu(["input"]) for _ in range(2)] == ["Relu:0", "Relu:0/1"]
    assert builder.aiOnnx.add(["input", "input/1"], "sum") == "sum/Add:0"
    with builder.nameScope("block"), builder.nameScope("inner"):
        assert builder.aiOnnx.add(["input", "input"], debugContext=popart.DebugContext("x")) == "block/inner/x/Add:0"
    assert builder.aiOnnx.split(["input"], 2, axis=1) == ["Split:0", "Split:1"]
    assert builder.getTensorShape("Split:1") == [2, 1]
    assert builder.getTensorDtypeString("init_input") == "float64"
    assert builder.getInputTensorIds()[-2:] == builder.getTrainableTensorIds() == ["init_input", "init_input/1"]


def test_a_weight_is_a_copy_whatever_its_memory_was() -> None:
    builder, array = popart.Builder(), np.arange(6, dtype=np.float32).reshape(2, 3)
    name = builder.addInitializedInputTensor(array.T)
    array[...] = 0
    [stored] = onnx.load_model_from_string(builder.getModelProto()).graph.initializer
    assert stored.name == name
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(stored), [[0, 3], [1, 4], [2, 5]])


def test_what_does_not_fit_is_an_error_at_the_call() -> None:
    builder = popart.Builder()
    x, y = (builder.addInputTensor("FLOAT", shape) for shape in ([2, 3], [4, 5]))
    for call, message in (
        (lambda: builder.aiOnnx.matmul([x, y]), r"MatMul .* \(input: FLOAT \[2, 3\], input/1: FLOAT \[4, 5\]\)"),
        (lambda: builder.aiOnnx.conv([x, y]), r"Conv 'Conv:0.*takes batch, channels|Conv .* does not fit"),
        (lambda: builder.aiOnnx.relu(["inpt"]), "'inpt' is not a tensor of this builder.*did you mean 'input'"),
        (lambda: builder.aiOnnx.relu(x), "takes a list of tensors; received the string 'input'"),
        (lambda: builder.aiGraphcore.l1loss([x], 1.0, "Sum"), "reduction must be a popart.ReductionType"),
        (lambda: builder.addOutputTensor("nothing"), "is not a tensor of this builder"),
        (lambda: builder.aiOnnx.reshape([x, builder.addInputTensor("INT64", [2])]), "which depends on data"),
        (lambda: builder.addInputTensor("FLOATS", [1]), "'FLOATS' is not a dtype"),
        (lambda: builder.addInputTensor("FLOAT", [-1]), "cannot be negative"),
    ):  # fmt: skip
        with pytest.raises(popart.popart_exception, match=message):
            call()
    with pytest.raises(AttributeError, match="no operator 'rellu' on the software device; did you mean 'relu'"):
        builder.aiOnnx.rellu([x])
    with pytest.raises(TypeError, match=r"aiOnnx.concat\(args, axis, debugContext=None\): missing"):
        builder.aiOnnx.concat([x, x])
    with pytest.raises(AttributeError, match="version 9 of ONNX's operators has no 'round'"):
        builder.aiOnnxOpset9.round([x])


def test_a_model_has_one_version_of_operators() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    builder.addOutputTensor(builder.aiOnnxOpset9.relu([x]))
    with pytest.raises(popart.popart_exception, match="This one uses 9; received aiOnnxOpset10"):
        builder.aiOnnx.relu([x])
    model = onnx.load_model_from_string(builder.getModelProto())
    assert model.opset_import[0].version == 9
    model.opset_import[0].version = 13  # whose softmax, for one, is another
    for later in (lambda: popart.Builder(model.SerializeToString()), lambda: popart.Builder(opsets={"ai.onnx": 13})):
        with pytest.raises(popart.popart_exception, match=r"version 6 to 11 of ONNX's operators, .*; received 13"):
            later()


def test_a_model_from_a_file_is_gone_on_with(tmp_path: Path) -> None:
    first = popart.Builder()
    w = first.addInitializedInputTensor(np.full(2, 3, np.float32))
    first.aiOnnx.neg([w])
    first.saveModelProto(str(tmp_path / "first.onnx"))
    builder = popart.Builder(str(tmp_path / "first.onnx"))
    assert builder.addInitializedInputTensor(np.ones(2, np.float32)) == "init_input/1"
    assert builder.aiOnnx.neg([w]) == "Neg:0/1"
    loss = builder.aiGraphcore.l1loss(["Neg:0"], 1.0, popart.ReductionType.Sum)
    session = session_of((builder.getModelProto(), loss), anchors={loss: popart.AnchorReturnType("All")})
    session.weightsFromHost()
    assert step(session)[loss] == 6


def test_annotations_of_place_and_stage_are_kept_and_change_nothing() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    with builder.virtualGraph(1), builder.pipelineStage(2):
        y = builder.aiOnnx.relu([x])
    builder.pipelineStage(y, 3)
    assert (builder.getNodeAttribute("__ipu_number", y), builder.getNodeAttribute("__pipeline_stage", [y])) == (1, 3)
    builder.setAvailableMemoryProportion(y, 0.2)
    assert builder.getNodeAttribute("__available_memory_proportion", y) == ["0.2"]
    assert builder.getTensorShape(builder.reshape_const(builder.aiOnnx, [y], [2, 1])) == [2, 1]
    builder.addNodeAttribute("my_own", "text", {y})
    assert builder.getNodeAttribute("my_own", {y}) == "text"
    with pytest.raises(popart.popart_exception, match="'other' is not an attribute of this node"):
        builder.getNodeAttribute("other", y)
    with pytest.raises(popart.popart_exception, match="no node gives"):
        builder.addNodeAttribute("my_own", 1, "nothing")


def test_hints_and_annotations_are_kept_and_change_nothing() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2, 2])
    off_chip = popart.TensorLocation(popart.TensorStorage.OffChip)
    with builder.outlineAttributes({"block": "1"}), builder.schedulePriority(5.0), builder.executionPhase(1):
        with builder.nameScope("inner"), builder.outputTensorLocation(off_chip):
            y = builder.aiOnnx.matmul([x, x])
            assert (builder.getNameScope("z"), builder.getExecutionPhase(), builder.hasPipelineStage()) == (
                "inner/z",
                1,
                False,
            )
    assert builder.getStringVectorNodeAttribute("__outline_attribute", y) == ["block", "1"]
    assert builder.getFloatNodeAttribute("__schedule_priority", {y}) == 5
    assert builder.getExecutionPhase(y) == 1 and not builder.hasExecutionPhase()
    builder.recomputeOutputInBackwardPass(y)
    builder.recomputeOutputInBackwardPass({y}, popart.RecomputeType.Checkpoint)
    builder.setPartialsType(y, "half")
    builder.setSerializeMatMul({y}, "output_channels", 2, keep_precision=True)
    builder.excludePatterns(y, ["MatMulRhsGradOp"])
    assert builder.getNodeAttribute("__partials_type", y) == ["half"]
    builder.removeNodeAttribute("__exclude_patterns", y)
    assert "__exclude_patterns" not in builder.getAllNodeAttributeNames(y)
    [kept] = builder.checkpointOutput([y])
    total = builder.aiGraphcore.identityloss([kept], popart.ReductionType.Sum)
    builder.setGraphName("mine")
    flow = popart.DataFlow(1, {total: popart.AnchorReturnType("All")})
    session = popart.InferenceSession(builder.getModelProto(), flow, popart.DeviceManager().createCpuDevice())
    session.prepareDevice()
    assert step(session, {x: np.float32([[1, 2], [3, 4]])})[total] == 54
    with pytest.raises(popart.popart_exception, match=r"inside of `with builder.pipelineStage\(...\)`"):
        builder.getPipelineStage()


def test_what_the_software_device_does_not_have_is_said() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    options = popart.SessionOptions()
    options.weightTensorLocationSettings.location.storage = popart.TensorStorage.OffChip
    options.optimizerStateTensorLocationSettings = popart.TensorLocationSettings(popart.TensorStorage.OffChip, 4)
    assert builder.customOp("Relu", 6, "ai.onnx", [x]) == ["Relu:0"]
    with pytest.raises(popart.popart_exception, match=r"no operator com\.acme\.Cube: custom operators are compiled"):
        builder.customOp(opName="Cube", opVersion=1, domain="com.acme", inputs=[x], attributes={})
    for ask, message in (
        (lambda: builder.createSubgraphBuilder(), "no 'createSubgraphBuilder' .*no graphs inside of graphs"),
        (lambda: builder.getTensorShap(x), "did you mean 'getTensorShape'"),
        (lambda: builder.aiGraphcore.ctcloss, "aiGraphcore has no operator 'ctcloss' on the software device"),
        (lambda: builder.aiGraphcore.dynamicslic, "did you mean 'dynamicslice'"),
        (lambda: popart.CommGroup, "the software device's popart has no 'CommGroup'"),
        (lambda: popart.TrainingSession.__new__(popart.TrainingSession).saveExecutable, "it compiles nothing"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=message):
            ask()
    with pytest.raises(popart.popart_exception, match="softmax's axis is of type INT; received 'output'"):
        builder.aiOnnx.softmax([x], "output")
    with pytest.raises(TypeError, match=r"aiGraphcore.reverse\(args, dimensions, .*missing"):
        builder.aiGraphcore.reverse([x])
