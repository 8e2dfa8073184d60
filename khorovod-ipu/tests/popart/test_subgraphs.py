"""Graphs inside of graphs: conditions, loops, scans and calls, beside the same in numpy; their gradients by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import popart

X = np.float32([[1, 2], [3, 4], [-1, 0.5], [0.25, -2]])
ZEROS = np.zeros(2, np.float32)


def _session(builder: Any, anchors: list[str], loss: str = "") -> tuple[Any, dict[str, Any]]:
    """A session that is ready to run, and its anchors."""
    flow, device = popart.DataFlow(1, anchors, popart.AnchorReturnType("All")), popart.DeviceManager().createCpuDevice()
    model = builder.getModelProto()
    if loss:
        session: Any = popart.TrainingSession(model, flow, loss, popart.ConstSGD(0.1), device)
    else:
        session = popart.InferenceSession(model, flow, device)
    session.prepareDevice()
    session.weightsFromHost()
    return session, session.initAnchorArrays()


def _loop(builder: Any, x: str, stacked: bool = True, trips: int = 3, condition: str = "") -> list[str]:
    """Add x to itself, and stack what it was on the way."""
    count, yes = builder.aiOnnx.constant(np.array(trips)), builder.aiOnnx.constant(np.array(True))
    body = builder.createSubgraphBuilder()
    body.setGraphName("body")
    body.addInputTensor(popart.TensorInfo("INT64", []))
    goes_on = body.addInputTensor(popart.TensorInfo("BOOL", []))
    value = body.addUntypedInputTensor(x)
    total = body.aiOnnx.add([value, x])
    for output in (condition or goes_on, total, *([total] * stacked)):
        body.addOutputTensor(output)
    return list(builder.aiOnnx.loop([count, yes, x], 1 + stacked, body))


def _scan(builder: Any, x: str) -> list[str]:
    """The state is half of what it was, plus a row; of the second input rows come from the end."""
    half, zeros = (builder.aiOnnx.constant(value) for value in (np.float32(0.5), ZEROS))
    body = builder.createSubgraphBuilder()
    state, row, other = (body.addInputTensor("FLOAT", [2]) for _ in range(3))
    following = body.aiOnnx.add([body.aiOnnx.mul([state, half]), row])
    for output in (following, body.aiOnnx.mul([following, other]), following):
        body.addOutputTensor(output)
    more = {"scan_input_directions": [0, 1], "scan_output_axes": [1, 0], "scan_output_directions": [0, 1]}
    return list(builder.aiOnnx.scan([zeros, x, x], 3, body, 2, **more))


def _if(limit: float) -> Callable[[Any, str], list[str]]:
    def build(builder: Any, x: str) -> list[str]:
        total = builder.aiOnnx.reducesum([x], keepdims=0)
        is_more = builder.aiOnnx.greater([total, builder.aiOnnx.constant(np.float32(limit))])
        branches = []
        for op in ("exp", "neg"):
            branch = builder.createSubgraphBuilder()
            branch.addInputTensorFromParentGraph(x)
            branch.addOutputTensor(getattr(branch.aiOnnx, op)([x]))
            branches.append(branch)
        then_branch, else_branch = branches
        return list(builder.aiOnnx.logical_if([is_more], 1, else_branch, then_branch))

    return build


def _scanned() -> list[Any]:
    states = []
    for row in X:
        states.append((states[-1] if states else ZEROS) * 0.5 + row)
    return [states[-1], np.stack([state * x for state, x in zip(states, X[::-1], strict=True)], 1), states[::-1]]


#: label -> (how it is built, what comes out)
CASES: dict[str, tuple[Callable[[Any, str], list[str]], list[Any]]] = {
    "loop": (_loop, [4 * X, np.stack([2 * X, 3 * X, 4 * X])]),
    "loop of no iteration": (lambda builder, x: _loop(builder, x, trips=0), [X, np.empty((0, 4, 2))]),
    "scan": (_scan, _scanned()),
    "if": (_if(0.0), [np.exp(X)]),
    "else": (_if(100.0), [-X]),
}


@pytest.mark.parametrize(("build", "expected"), CASES.values(), ids=CASES)
def test_values_are_those_of_onnx(build: Callable[[Any, str], list[str]], expected: list[Any]) -> None:
    builder = popart.Builder(opsets={"ai.onnx": 11})
    outputs = build(builder, builder.addInputTensor("FLOAT", [4, 2], "x"))
    assert [builder.getTensorShape(output) for output in outputs] == [list(np.shape(value)) for value in expected]
    for output in outputs:
        builder.addOutputTensor(output)
    onnx.checker.check_model(onnx.load_model_from_string(builder.getModelProto()))
    session, anchors = _session(builder, outputs)
    session.run(popart.PyStepIO({"x": X}, anchors))
    for output, value in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(anchors[output], np.reshape(value, anchors[output].shape), rtol=1e-6)


def _trained(build: Callable[[Any, str, str], str]) -> Any:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2], "x")
    w = builder.addInitializedInputTensor(np.float32([2, 3]), "w")
    loss = builder.aiGraphcore.identityloss([build(builder, x, w)], popart.ReductionType.Sum)
    session, anchors = _session(builder, ["Gradient___w"], loss)
    session.run(popart.PyStepIO({"x": np.float32([5, 7])}, anchors))
    return anchors["Gradient___w"].tolist()


def test_weights_that_only_subgraphs_read_are_trained() -> None:
    def looped(builder: Any, x: str, w: str) -> str:
        body = builder.createSubgraphBuilder()
        body.addInputTensor("INT64", [])
        goes_on = body.addInputTensor("BOOL", [])
        value = body.addUntypedInputTensor()
        body.addOutputTensor(goes_on)
        body.addOutputTensor(body.aiOnnx.mul([value, w]))
        count, yes = builder.aiOnnx.constant(np.array(3)), builder.aiOnnx.constant(np.array(True))
        return str(builder.aiOnnx.loop([count, yes, x], 1, body)[0])

    assert _trained(looped) == [3 * 5 * 2**2, 3 * 7 * 3**2]

    def called_twice(builder: Any, x: str, w: str) -> str:
        callee = builder.createSubgraphBuilder()
        left, right = (callee.addInputTensor("FLOAT", [2]) for _ in range(2))
        callee.addOutputTensor(callee.aiOnnx.mul([left, right]))
        (once,) = builder.aiGraphcore.call([x, w], 1, callee)
        return str(builder.aiGraphcore.call([once, w], 1, callee)[0])

    assert _trained(called_twice) == [2 * 5 * 2, 2 * 7 * 3]


def test_a_graph_that_does_not_fit_its_node_is_refused() -> None:
    builder = popart.Builder()
    x, y = builder.addInputTensor("FLOAT", [2]), builder.addInputTensor("FLOAT", [3])
    one = builder.createSubgraphBuilder()
    with pytest.raises(popart.popart_exception, match="weights belong to the main graph"):
        one.addInitializedInputTensor(ZEROS)
    with pytest.raises(popart.popart_exception, match="only subgraphs have inputs without a type"):
        builder.addUntypedInputTensor()
    with pytest.raises(popart.popart_exception, match="is not a tensor of the graph around this one"):
        one.addInputTensorFromParentGraph("z")
    one.addOutputTensor(one.aiOnnx.exp([x]))
    other = builder.createSubgraphBuilder()
    other.addOutputTensor(other.aiOnnx.exp([y]))
    condition = builder.addInputTensor("BOOL", [])
    with pytest.raises(popart.popart_exception, match="both branches must give the same shapes"):
        builder.aiOnnx.logical_if([condition], 1, other, one)
    with pytest.raises(popart.popart_exception, match="needs a subgraph of 1 inputs and 1 outputs; received one of 0"):
        builder.aiGraphcore.call([x], 1, one)
    with pytest.raises(popart.popart_exception, match="takes a builder that createSubgraphBuilder"):
        builder.aiGraphcore.call([x], 1, "one")
    no = builder.aiOnnx.constant(np.array(False))  # a result of every iteration, too
    stacked = _loop(builder, x, condition=no)
    session, anchors = _session(builder, stacked)
    with pytest.raises(popart.popart_exception, match="ended after 1 of 3 iterations, and stacks their results"):
        session.run(popart.PyStepIO({x: ZEROS}, anchors))
    with pytest.raises(popart.popart_exception, match="takes its shape from"):
        builder.aiOnnx.loop([builder.addInputTensor("INT64", []), no, x], 1, _grows(builder, x))
    with pytest.raises(popart.popart_exception, match="must keep shape and dtype"):
        builder.aiOnnx.loop([builder.aiOnnx.constant(np.array(2)), no, x], 1, _grows(builder, x))


def _grows(builder: Any, x: str) -> Any:
    body = builder.createSubgraphBuilder()
    body.addInputTensor("INT64", [])
    goes_on = body.addInputTensor("BOOL", [])
    value = body.addUntypedInputTensor()
    body.addOutputTensor(goes_on)
    body.addOutputTensor(body.aiOnnx.concat([value, value], 0))
    return body
