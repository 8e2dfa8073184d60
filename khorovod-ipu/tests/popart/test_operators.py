"""Results of operators beside ONNX's own reference; and the losses' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from popart_models import session_of, step

import popart

Build = Callable[[Any, list[str]], Any]
RANDOM = np.random.RandomState(0)


def floats(*shape: int) -> Any:
    return RANDOM.randn(*shape).astype(np.float32)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def positive(*shape: int) -> Any:
    return (RANDOM.rand(*shape) + 0.5).astype(np.float32)


X = floats(2, 3, 4, 5)
IMAGE, KERNEL = floats(2, 4, 7, 6), floats(6, 2, 3, 3)

#: label -> (how it is built, inputs)
CASES: dict[str, tuple[Build, list[Any]]] = {
    **{
        op: (lambda o, i, op=op: getattr(o, op)(i), [X])
        for op in ("abs", "ceil", "cos", "erf", "exp", "floor", "neg", "relu", "sigmoid", "sign", "sin", "tanh",
                   "softplus", "softsign", "identity", "elu", "selu", "leakyrelu", "hardsigmoid", "thresholdedrelu",
                   "shape", "size", "flatten", "transpose", "globalaveragepool",
                   "globalmaxpool", "reducesum", "reducemean", "reducel2", "reducemax", "reduceprod",
                   "reducelogsumexp")
    },
    **{
        op: (lambda o, i, op=op: getattr(o, op)(i), [positive(2, 3)])
        for op in ("log", "sqrt", "reciprocal", "reducel1", "softmax", "logsoftmax", "hardmax")
    },
    **{
        op: (lambda o, i, op=op: getattr(o, op)(i), [X, floats(3, 1, 5)])
        for op in ("add", "sub", "mul", "div", "less", "greater", "sum", "mean", "max", "min", "prelu")
    },
    "pow": (lambda o, i: o.pow(i), [positive(2, 3), np.float32([2.0])]),
    "equal": (lambda o, i: o.equal(i), [ints(1, 2, 3), ints(1, 5, 3)]),
    "div of integers": (lambda o, i: o.div(i), [ints(7, -7, 8), ints(2, 2, 3)]),
    "mod": (lambda o, i: o.mod(i), [ints(7, -7, 8), ints(3, 3, 3)]),
    "and": (lambda o, i: o.logical_and(i),
            [np.array([True, False]), np.array([True, True])]),
    "or": (lambda o, i: o.logical_or(i), [np.array([True, False]), np.array([False, False])]),
    "where": (lambda o, i: o.where(i), [np.array([True, False]), floats(2), floats(2)]),
    "cast": (lambda o, i: o.cast(i, "INT32"), [X]),
    "clip": (lambda o, i: o.clip(i, max=0.5, min=-0.25), [X]),
    "matmul": (lambda o, i: o.matmul(i), [floats(2, 3, 4), floats(4, 5)]),
    "gemm": (lambda o, i: o.gemm(i, 0.5, 2.0, 1, 1), [floats(4, 3), floats(5, 4), floats(5)]),
    "conv": (lambda o, i: o.conv(i, group=2, pads=[1, 0, 2, 1], strides=[2, 1]), [IMAGE, KERNEL, floats(6)]),
    "dilated conv": (lambda o, i: o.conv(i, dilations=[2, 2]), [floats(1, 2, 9, 9), floats(3, 2, 3, 3)]),
    "conv of one dimension": (lambda o, i: o.conv(i, pads=[1, 1]), [floats(2, 3, 8), floats(4, 3, 3)]),
    "same conv": (lambda o, i: o.conv(i, auto_pad="SAME_UPPER", strides=[2, 2]), [IMAGE, floats(2, 4, 3, 3)]),
    "convtranspose": (lambda o, i: o.convtranspose(i, pads=[1, 1, 1, 1], strides=[2, 2]),
                      [floats(1, 2, 4, 4), floats(2, 3, 3, 3)]),
    "maxpool": (lambda o, i: o.maxpool(i, 1, [3, 2], pads=[1, 0, 1, 1], strides=[2, 2])[0], [IMAGE]),
    "averagepool": (lambda o, i: o.averagepool(i, [3, 2], pads=[1, 0, 1, 1], strides=[2, 2]), [IMAGE]),
    "padded averagepool": (lambda o, i: o.averagepool(i, [3, 3], count_include_pad=1, pads=[1] * 4), [IMAGE]),
    "instancenormalization": (lambda o, i: o.instancenormalization(i), [IMAGE, positive(4), floats(4)]),
    "softmax of the last axis": (lambda o, i: o.softmax(i, axis=3), [X]),
    "reduced axes": (lambda o, i: o.reducemean(i, axes=[1, 2], keepdims=0), [X]),
    "argmax": (lambda o, i: o.argmax(i, axis=1, keepdims=0), [X]),
    "topk": (lambda o, i: o.topk([i[0], o.constant(ints(2))], axis=1)[0], [X]),
    "places of topk": (lambda o, i: o.topk([i[0], o.constant(ints(2))])[1], [X]),
    "cumsum": (lambda o, i: o.cumsum([i[0], o.constant(np.array(1, np.int32))], reverse=1), [X]),
    "reshape": (lambda o, i: o.reshape([i[0], o.constant(ints(0, -1))]), [X]),
    "squeeze": (lambda o, i: o.squeeze(i, axes=[1]), [floats(2, 1, 3)]),
    "unsqueeze": (lambda o, i: o.unsqueeze(i, axes=[0, 3]), [floats(2, 3)]),
    "expand": (lambda o, i: o.expand([i[0], o.constant(ints(2, 3, 4))]), [floats(3, 1)]),
    "tile": (lambda o, i: o.tile([i[0], o.constant(ints(2, 3))]), [floats(2, 2)]),
    "concat": (lambda o, i: o.concat(i, 1), [floats(2, 3), floats(2, 1)]),
    "split": (lambda o, i: o.split(i, 2, axis=1, split=[1, 3])[1], [floats(2, 4)]),
    "slice": (lambda o, i: o.slice([i[0], o.constant(ints(-1, 0)), o.constant(ints(-9, 9)), o.constant(ints(3, 0)),
                                    o.constant(ints(-2, 1))]), [X]),
    "pad": (lambda o, i: o.pad(i, [0, 1, 1, 0], mode="reflect"), [floats(3, 4)]),
    "gather": (lambda o, i: o.gather(i, axis=1), [X, np.array([[0, 2], [1, 1]], np.int64)]),
    "onehot": (lambda o, i: o.onehot([*i, o.constant(np.array(4)), o.constant(np.float32([-1, 2]))], axis=1),
               [np.array([[0, 3], [1, 2]], np.int64)]),
    "gatherelements": (lambda o, i: o.gatherelements(i, axis=1), [floats(2, 3), np.array([[0, -1], [1, 1]], np.int64)]),
    "gathernd": (lambda o, i: o.gathernd(i), [X, np.array([[[0, 1], [1, -1]]], np.int64)]),
    "scatternd": (lambda o, i: o.scatternd(i), [floats(4, 2), ints(1, 3).reshape(2, 1), floats(2, 2)]),
    "reversesequence": (lambda o, i: o.reversesequence(i), [floats(4, 3, 2), ints(4, 1, 3)]),
    "reversesequence by batch": (lambda o, i: o.reversesequence(i, batch_axis=0, time_axis=1), [X, ints(3, 2)]),
    "depthtospace": (lambda o, i: o.depthtospace(i, 2), [floats(2, 8, 3, 2)]),
    "scrambled depthtospace": (lambda o, i: o.depthtospace(i, 2, mode="CRD"), [floats(2, 8, 3, 2)]),
    "spacetodepth": (lambda o, i: o.spacetodepth(i, 2), [floats(2, 3, 4, 6)]),
    "eyelike": (lambda o, i: o.eyelike(i, dtype=1, k=1), [floats(3, 4)]),
    "isinf": (lambda o, i: o.isinf(i, detect_negative=0), [np.float32([1, np.inf, -np.inf])]),
    "shrink": (lambda o, i: o.shrink(i, bias=0.1, lambd=0.3), [X]),
    "lpnormalization": (lambda o, i: o.lpnormalization(i, axis=1), [X]),
    "meanvariancenormalization": (lambda o, i: o.meanvariancenormalization(i), [X]),
    "range": (lambda o, i: o.add([i[0], o.range([o.constant(np.float32(n)) for n in (1, 6, 2)])]), [floats(2, 3)]),
    "lstm": (lambda o, i: o.lstm([*i, "", "", "", ""][:7], 3, hidden_size=4)[0],
             [floats(5, 2, 3), floats(1, 16, 3), floats(1, 16, 4), floats(1, 32)]),
    "gru": (lambda o, i: o.gru(i, 2, hidden_size=4)[1], [floats(5, 2, 3), floats(1, 12, 3), floats(1, 12, 4)]),
    "rnn": (lambda o, i: o.rnn(i, 2, hidden_size=4)[0], [floats(5, 2, 3), floats(1, 4, 3), floats(1, 4, 4)]),
    "constantofshape": (lambda o, i: o.add([i[0], o.constantofshape([o.shape(i)], np.float32([2]))]), [X]),
}  # fmt: skip
NEWER = ("cumsum", "scrambled", "gatherelements", "gathernd", "scatternd", "range")


def compute(build: Build, arrays: list[Any]) -> tuple[Any, bytes, str]:
    """The value on the software device; the model; and the id of the output."""
    # Operators that came with operator set 11 or later, or have more options there.
    newer = any(build is CASES[label][0] for label in CASES if label.startswith(NEWER))
    builder = popart.Builder(opsets={"ai.onnx": 11} if newer else None)
    names = [builder.addInputTensor(popart.TensorInfo(a), f"in{i}") for i, a in enumerate(arrays)]
    output = build(builder.aiOnnx, names)
    builder.addOutputTensor(output)
    flow = popart.DataFlow(1, {output: popart.AnchorReturnType("All")})
    session = popart.InferenceSession(builder.getModelProto(), flow, popart.DeviceManager().createCpuDevice())
    session.prepareDevice()
    return step(session, dict(zip(names, arrays, strict=True)))[output], builder.getModelProto(), output


@pytest.mark.parametrize("label", CASES)
def test_an_operator_computes_what_onnx_says(label: str) -> None:
    build, arrays = CASES[label]
    found, model, output = compute(build, arrays)
    proto = onnx.load_model_from_string(model)
    onnx.checker.check_model(proto, full_check=True)
    feeds = {f"in{i}": array for i, array in enumerate(arrays)}
    [expected] = ReferenceEvaluator(proto).run([output], feeds)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_what_the_reference_does_otherwise_than_onnx_says_for_operator_set_10() -> None:
    """Its softmax is that of set 13, its batch normalization always trains, its LRN leaves channels out."""
    found, _, _ = compute(lambda o, i: o.softmax(i), [X])
    flat = np.exp(X.reshape(2, -1))
    np.testing.assert_allclose(found.reshape(2, -1), flat / flat.sum(1, keepdims=True), rtol=1e-5)
    scale, shift, mean, variance = (positive(4) for _ in range(4))
    found, _, _ = compute(lambda o, i: o.batchnormalization(i, 1)[0], [IMAGE, scale, shift, mean, variance])
    across = (slice(None), None, None)
    expected = (IMAGE - mean[across]) / np.sqrt(variance[across] + 1e-5) * scale[across] + shift[across]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    places = ints(-1, 4, 3, 7)
    found, _, _ = compute(lambda o, i: o.onehot([*i, o.constant(np.array(4)), o.constant(ints(5, 6))]), [places])
    assert found.tolist() == [[5] * 4, [5] * 4, [5, 5, 5, 6], [5] * 4], "indices outside of [0, depth) are off"
    found, _, _ = compute(lambda o, i: o.lrn(i, 3, alpha=0.1, beta=0.5, bias=2.0), [IMAGE])
    squares = np.pad(IMAGE**2, [(0, 0), (1, 1), (0, 0), (0, 0)])
    around = sum(squares[:, start : start + 4] for start in range(3))
    np.testing.assert_allclose(found, IMAGE / np.sqrt(2 + 0.1 / 3 * around), rtol=1e-5)


def gradient_of(build: Callable[[Any, str], str], start: Any) -> tuple[float, Any]:
    """The loss and its gradient by the only weight."""
    builder = popart.Builder()
    weight = builder.addInitializedInputTensor(start, "w")
    loss = build(builder, weight)
    flow = {name: popart.AnchorReturnType("Final") for name in (loss, popart.reservedGradientPrefix() + weight)}
    session = session_of((builder.getModelProto(), loss), None, popart.ConstSGD(0.0), anchors=flow)
    session.weightsFromHost()
    found = step(session)
    return float(found[loss]), found["Gradient___w"]


def labels(builder: Any, *values: int) -> str:
    return str(builder.aiOnnx.constant(np.array(values, np.int32)))


def test_the_likelihood_of_probabilities_has_the_gradient_of_popart() -> None:
    # The last row's label has no probability at all, which is what raw logits may look like.
    start = np.float32([[0.5, 0.5], [0.25, 0.75], [-1.0, 2.0]])
    loss, gradient = gradient_of(
        lambda b, w: b.aiGraphcore.nllloss([w, labels(b, 0, 1, 0)], popart.ReductionType.Sum), start
    )
    assert loss == pytest.approx(-np.log(0.5) - np.log(0.75) - np.log(1e-7), rel=1e-5)
    np.testing.assert_allclose(gradient, [[-2, 0], [0, -1 / 0.75], [-1e10, 0]], rtol=1e-5)


def test_a_softmax_before_the_likelihood_is_differentiated_with_it() -> None:
    start = np.float32([[1000.0, 0.0], [0.0, 1.0]])  # in two steps the first row would give 0/0
    loss, gradient = gradient_of(
        lambda b, w: b.aiGraphcore.nllloss([b.aiOnnx.softmax([w]), labels(b, 1, 1)], popart.ReductionType.Sum), start
    )
    other = 1 / (1 + np.e)
    np.testing.assert_allclose(gradient, [[1, -1], [other, -other]], rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(-np.log(1e-7) - np.log(1 - other), rel=1e-5)


def test_a_softmax_over_other_axes_than_the_labels_classes_has_a_gradient_of_its_own() -> None:
    start, upstream = floats(2, 2, 3), np.zeros((2, 6), np.float32)
    loss, gradient = gradient_of(
        lambda b, w: b.aiGraphcore.nllloss(
            [b.aiOnnx.softmax([w]), b.aiOnnx.constant(np.int32([[0, 2], [1, 0]]))], popart.ReductionType.Sum
        ),
        start,
    )
    rows = np.exp(start.reshape(2, 6))
    rows /= rows.sum(1, keepdims=True)
    for row, place in ((0, 0), (0, 5), (1, 1), (1, 3)):
        upstream[row, place] = -1 / rows[row, place]
    assert loss == pytest.approx(-np.log(rows[upstream != 0]).sum(), rel=1e-5)
    expected = rows * (upstream - (rows * upstream).sum(1, keepdims=True))
    np.testing.assert_allclose(gradient.reshape(2, 6), expected, rtol=1e-4, atol=1e-6)


def test_statistics_that_are_no_weights_are_not_kept() -> None:
    def build(builder: Any, weight: str) -> str:
        rest = [builder.aiOnnx.constant(np.full(3, value, np.float32)) for value in (2, 0, 0, 1)]
        normal, *_ = builder.aiOnnx.batchnormalization([weight, *rest], 5)
        return str(builder.aiGraphcore.identityloss([builder.aiOnnx.mul([normal, normal])], popart.ReductionType.Sum))

    loss, _ = gradient_of(build, floats(4, 3))
    assert loss == pytest.approx(2 * 2 * 4 * 3, rel=1e-3)


@pytest.mark.parametrize(
    ("build", "shapes", "named"),
    [
        (lambda b, i: b.aiOnnxOpset6.add(i, axis=1, broadcast=1), [(2, 3, 3), (3,)], "Add .* imitate axis=1"),
        (lambda b, i: b.aiOnnxOpset7.batchnormalization(i, 1, spatial=0), [(2, 3), *[(3,)] * 4], "spatial=0"),
        (lambda b, i: b.aiOnnx.convtranspose(i, output_shape=[8, 8], strides=[2, 2]), [(1, 2, 4, 4), (2, 3, 3, 3)],
         r"output_shape=\[8, 8\]"),
        (lambda b, i: b.aiOnnx.convtranspose(i, auto_pad="SAME_UPPER"), [(1, 2, 4, 4), (2, 3, 3, 3)], "'SAME_UPPER'"),
        (lambda b, i: b.aiOnnx.randomnormallike(i, seed=3.0), [(2,)], "RandomNormalLike .* imitate seed=3.0"),
        (lambda b, i: b.aiOnnx.randomuniform([2], seed=3.0), [], "RandomUniform .* imitate seed=3.0"),
    ],
)  # fmt: skip
def test_attributes_that_would_change_the_result_are_refused(build: Any, shapes: Any, named: str) -> None:
    builder = popart.Builder()
    names = [builder.addInputTensor("FLOAT", list(shape)) for shape in shapes]
    with pytest.raises(popart.popart_exception, match=named):
        build(builder, names)


def test_operators_of_version_6_behave_in_training_as_in_a_test_where_they_say_so() -> None:
    start = floats(4, 3)

    def build(builder: Any, weight: str) -> str:
        rest = [builder.aiOnnxOpset6.constant(np.full(3, value, np.float32)) for value in (2, 0, 0, 1)]
        kept = builder.aiOnnxOpset6.dropout([weight], 1, is_test=1, ratio=0.9)
        normal, *_ = builder.aiOnnxOpset6.batchnormalization([*kept, *rest], 5, is_test=1)
        return str(builder.aiGraphcore.identityloss([normal], popart.ReductionType.Sum))

    loss, _ = gradient_of(build, start)
    assert loss == pytest.approx(2 * start.sum(), rel=1e-4)


def test_logarithms_of_probabilities_ignored_labels_and_the_mean() -> None:
    start = np.log(np.float32([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]))
    loss, gradient = gradient_of(
        lambda b, w: b.aiGraphcore.nllloss([w, labels(b, 0, 1, 7)], ignoreIndex=7, inputIsLogProbability=True), start
    )
    assert loss == pytest.approx(-(np.log(0.5) + np.log(0.75)) / 2, rel=1e-5)
    np.testing.assert_allclose(gradient, [[-0.5, 0], [0, -0.5], [0, 0]])


def test_the_absolute_value_has_no_gradient_at_zero() -> None:
    loss, gradient = gradient_of(lambda b, w: b.aiGraphcore.l1loss([w], 3.0), np.float32([-2.0, 0.0, 1.0]))
    assert loss == pytest.approx(3.0)
    np.testing.assert_allclose(gradient, [-1, 0, 1])


def test_operators_of_graphcore_beside_the_losses() -> None:
    x = floats(2, 4, 3)
    builder = popart.Builder()
    name = builder.addInputTensor(popart.TensorInfo(x))
    ones, zeros = (builder.aiOnnx.constant(np.full(4, v, np.float32)) for v in (1, 0))
    normal, mean, _ = builder.aiGraphcore.groupnormalization([name, ones, zeros], 2)
    ids = {
        "gelu": builder.aiGraphcore.gelu([name]), "scale": builder.aiGraphcore.scale([name], 2.5),
        "nop": builder.aiGraphcore.nop([builder.aiGraphcore.detach([name])]), "normal": normal, "mean": mean,
        "sum": builder.aiGraphcore.replicatedallreduce([name]),
    }  # fmt: skip
    flow = popart.DataFlow(1, {output: popart.AnchorReturnType("All") for output in ids.values()})
    session = popart.InferenceSession(builder.getModelProto(), flow, popart.DeviceManager().createCpuDevice())
    session.prepareDevice()
    found = {label: step(session, {name: x})[output] for label, output in ids.items()}
    rows = x.reshape(2, 2, 6)
    np.testing.assert_allclose(found["mean"], rows.mean(-1).reshape(-1), atol=1e-6)
    centred = rows - rows.mean(-1, keepdims=True)
    expected = centred / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found["normal"].reshape(2, 2, 6), expected, atol=1e-5)
    np.testing.assert_allclose(found["scale"], x * 2.5)
    np.testing.assert_array_equal(found["nop"], x)
    np.testing.assert_array_equal(found["sum"], x)
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    np.testing.assert_allclose(found["gelu"], 0.5 * x * (1 + np.tanh(inner)), atol=1e-6)


def test_further_operators_of_graphcore_compute_what_numpy_does(capfd: pytest.CaptureFixture[str]) -> None:
    x, y, numbers = floats(3, 4), floats(3, 4), np.int32([[5, 6], [7, 8]])
    builder = popart.Builder()
    a, b, n = (builder.addInputTensor(popart.TensorInfo(value)) for value in (x, y, numbers))
    ops, start = builder.aiGraphcore, builder.aiOnnx.constant(np.uint32([1]))
    part, updated, added, zeroed = x[:, 1:3], x.copy(), x.copy(), x.copy()
    updated[:, 1:3], added[:, 1:3], zeroed[:, 1:3] = 2 * part, 3 * part, 0
    twice = ops.scale([ops.dynamicslice([a, start], [1], [2])], 2.0)
    expected = {
        ops.atan2([a, b]): np.arctan2(x, y), ops.expm1([a]): np.expm1(x), ops.round([a]): np.round(x),
        ops.fmod([a, b]): np.fmod(x, y), ops.remainder([a, b]): np.mod(x, y), ops.swish([a]): x / (1 + np.exp(-x)),
        ops.bitwisexor([n, n]): numbers * 0, ops.bitwiseor([n, n]): numbers, ops.bitwisenot([n]): ~numbers,
        ops.incrementmod([n], 4, 10): (numbers + 4) % 10, ops.reverse([a], [1]): x[:, ::-1],
        ops.reshape([a], [2, 6]): x.reshape(2, 6), ops.subsample([a], [2, 1]): x[::2],
        ops.slice([a], ends=[3, 2], starts=[1, 0]): x[1:3, :2], ops.shapeddropout([a], [3, 1], ratio=0.9): x,
        twice: 2 * part, ops.dynamicupdate([a, start, twice], axes=[1], sizes=[2], noOverlap=1): updated,
        ops.dynamicadd([a, start, twice], [1], [2]): added, ops.dynamiczero([a, start], [1], [2]): zeroed,
        ops.printtensor([n], title="seen"): numbers,
    }  # fmt: skip
    flow = popart.DataFlow(1, dict.fromkeys(expected, popart.AnchorReturnType("All")))
    session = popart.InferenceSession(builder.getModelProto(), flow, popart.DeviceManager().createCpuDevice())
    session.prepareDevice()
    found = step(session, {a: x, b: y, n: numbers})
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert "seen: [[5, 6], [7, 8]]" in capfd.readouterr().err


def test_gradients_pass_through_what_is_cut_out_dynamically() -> None:
    def build(builder: Any, weight: str) -> str:
        start = builder.aiOnnx.constant(np.int32([1]))
        part = builder.aiGraphcore.dynamicslice([weight, start], axes=[0], sizes=[2])
        whole = builder.aiGraphcore.dynamicadd([weight, start, part], axes=[0], sizes=[2])
        return str(builder.aiGraphcore.identityloss([whole], popart.ReductionType.Sum))

    loss, gradient = gradient_of(build, np.float32([1, 2, 3, 4]))
    assert loss == 15
    np.testing.assert_array_equal(gradient, [1, 2, 2, 1])
    with pytest.raises(popart.popart_exception, match="2 elements from 3 on are not inside of dimension 0"):
        gradient_of(
            lambda b, w: b.aiGraphcore.identityloss(
                [b.aiGraphcore.dynamicslice([w, b.aiOnnx.constant(np.int32([3]))], axes=[0], sizes=[2])]
            ),
            np.float32([1, 2, 3, 4]),
        )


def test_reducing_no_axes_leaves_the_shape_as_it_is() -> None:
    for name, expected in (("reducesumsquare", X**2), ("reducemean", X), ("reducel1", abs(X))):
        found, *_ = compute(lambda o, i, name=name: getattr(o, name)(i, axes=[], keepdims=0), [X])
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["reducesum", "reduceprod", "reducel1", "reducesumsquare", "cumsum"])
def test_sums_of_whole_numbers_have_the_dtype_of_their_terms(name: str) -> None:
    x, builder = np.arange(6, dtype=np.int32).reshape(2, 3), popart.Builder(opsets={"ai.onnx": 11})
    given = builder.addInputTensor(popart.TensorInfo(x))
    axis = builder.aiOnnx.constant(np.int64(1))
    made = getattr(builder.aiOnnx, name)(*([[given, axis]] if name == "cumsum" else [[given], [1]]))
    assert builder.getTensorDtypeString(made) == "int32"
    flow = popart.DataFlow(1, {made: popart.AnchorReturnType("All")})
    session = popart.InferenceSession(builder.getModelProto(), flow, popart.DeviceManager().createCpuDevice())
    session.prepareDevice()
    expected = {"reduceprod": x.prod(1), "reducesumsquare": (x**2).sum(1), "cumsum": x.cumsum(1)}.get(name, x.sum(1))
    found = step(session, {given: x})[made]
    assert found.dtype == np.int32 and found.ravel().tolist() == expected.ravel().tolist()


def test_dropout_of_a_shape_leaves_half_precision_as_it_is() -> None:
    x, builder = np.float16([[1, 2, 3], [4, 5, 6]]), popart.Builder()
    given, weight = builder.addInputTensor(popart.TensorInfo(x)), builder.addInitializedInputTensor(np.float16([1]))
    made = builder.aiGraphcore.shapeddropout([builder.aiOnnx.mul([given, weight])], [2, 1], ratio=0.0)
    loss = builder.aiGraphcore.l1loss([made], 1.0)
    flow = {made: popart.AnchorReturnType("Final")}
    session = session_of((builder.getModelProto(), loss), anchors=flow)
    session.weightsFromHost()
    found = step(session, {given: x})[made]
    assert builder.getTensorDtypeString(made) == "float16" and found.dtype == np.float16
    np.testing.assert_array_equal(found, x)
