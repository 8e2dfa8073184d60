"""Recurrent layers: values and gradients are those of torch's own layers; random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from popart_models import session_of, step

import popart

STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 6


def values_and_gradients(
    weights: Mapping[str, Any], build: Callable[[Any, Mapping[str, str]], list[str]]
) -> tuple[list[Any], dict[str, Any]]:
    """Outputs, and the gradients of the sum of their squares, from the device."""
    builder = popart.Builder(opsets={"ai.onnx": 11})
    ids = {name: builder.addInitializedInputTensor(array, name) for name, array in weights.items()}
    outputs = build(builder, ids)
    losses = [builder.aiGraphcore.identityloss([builder.aiOnnx.mul([o, o])], popart.ReductionType.Sum) for o in outputs]
    loss = builder.aiOnnx.sum(losses)
    final = popart.AnchorReturnType("Final")
    anchors = dict.fromkeys([*outputs, *(f"Gradient___{name}" for name in weights)], final)
    session = session_of((builder.getModelProto(), loss), None, popart.ConstSGD(0.0), anchors=anchors)
    session.weightsFromHost()
    found = step(session)
    return [found[output] for output in outputs], {name: found[f"Gradient___{name}"] for name in weights}


def reordered(parameter: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Gates in ONNX's order: torch has input, forget, cell, output, or reset, update, new."""
    return torch.cat([parameter.chunk(len(order))[gate] for gate in order])


@pytest.mark.parametrize(
    ("kind", "layer", "order"),
    [("lstm", torch.nn.LSTM, [0, 3, 1, 2]), ("gru", torch.nn.GRU, [1, 0, 2]), ("rnn", torch.nn.RNN, [0])],
)
@pytest.mark.parametrize("both", [False, True], ids=["forward", "bidirectional"])
def test_a_recurrent_layer_is_torchs(kind: str, layer: Any, order: list[int], both: bool) -> None:
    torch.manual_seed(0)
    own = layer(INPUT, HIDDEN, bidirectional=both)
    x = torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
    ends = ["", "_reverse"][: 1 + both]

    def of_torch(what: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
        """Weights, or their gradients, as ONNX has them."""
        w, r, *biases = (
            torch.stack([reordered(what(getattr(own, f"{name}_l0{end}")), order) for end in ends])
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        return {name: t.numpy().copy() for name, t in {"x": what(x), "w": w, "r": r, "b": torch.cat(biases, 1)}.items()}

    def build(builder: Any, ids: Mapping[str, str]) -> list[str]:
        how = {"linear_before_reset": 1} if kind == "gru" else {}
        make = getattr(builder.aiOnnx, kind)
        direction = "bidirectional" if both else "forward"
        found: list[str] = make(
            [ids[n] for n in "xwrb"], 3 if kind == "lstm" else 2, hidden_size=HIDDEN, direction=direction, **how
        )
        return found

    outputs, gradients = values_and_gradients(of_torch(torch.Tensor.detach), build)
    whole, last = own(x)
    lasts = list(last) if kind == "lstm" else [last]
    shaped = whole.reshape(STEPS, BATCH, len(ends), HIDDEN).transpose(1, 2)
    for found, expected in zip(outputs, [shaped, *lasts], strict=True):
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    sum((value * value).sum() for value in (whole, *lasts)).backward()
    for name, expected in of_torch(lambda tensor: tensor.grad).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_sequences_of_unlike_lengths_end_where_they_end(direction: str) -> None:
    torch.manual_seed(0)
    own, x, lengths = torch.nn.LSTM(INPUT, HIDDEN), torch.randn(STEPS, BATCH, INPUT), [5, 2, 4]
    w, r = (reordered(getattr(own, f"weight_{n}_l0"), [0, 3, 1, 2])[None].detach().numpy() for n in ("ih", "hh"))
    b = torch.cat([reordered(getattr(own, f"bias_{n}_l0"), [0, 3, 1, 2]) for n in ("ih", "hh")])[None].detach().numpy()

    def build(builder: Any, ids: Mapping[str, str]) -> list[str]:
        ends = builder.aiOnnx.constant(np.array(lengths, np.int32))
        found: list[str] = builder.aiOnnx.lstm(
            [*(ids[n] for n in "xwrb"), ends], 3, hidden_size=HIDDEN, direction=direction
        )
        return found

    (rows, last, _), _ = values_and_gradients({"x": x.numpy().copy(), "w": w, "r": r, "b": b}, build)
    for sequence, length in enumerate(lengths):
        part = x[:length, sequence]
        with torch.no_grad():
            expected, (hidden, _) = own(part if direction == "forward" else part.flip(0))
        expected = expected if direction == "forward" else expected.flip(0)
        np.testing.assert_allclose(rows[:length, 0, sequence], expected.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(last[0, sequence], hidden[0].numpy(), rtol=1e-5, atol=1e-6)
        assert not rows[length:, 0, sequence].any()


def test_what_a_recurrent_layer_cannot_be_is_said() -> None:
    builder = popart.Builder()
    x, w, r = (
        builder.addInitializedInputTensor(np.zeros(shape, np.float32))
        for shape in ((STEPS, BATCH, INPUT), (1, 4 * HIDDEN, INPUT), (1, 4 * HIDDEN, HIDDEN))
    )
    with pytest.raises(popart.popart_exception, match=r"weights of \(2, 24, 4\)"):
        builder.aiOnnx.lstm([x, w, r], 1, hidden_size=HIDDEN, direction="bidirectional")
    with pytest.raises(popart.popart_exception, match="takes 3 activations per direction"):
        builder.aiOnnx.lstm([x, w, r], 1, hidden_size=HIDDEN, activations=["Sigmoid", "Tanh", "Step"])


def test_noise_as_in_generators() -> None:
    """Fresh numbers each time, the same ones from the same seed."""
    builder = popart.Builder()
    w = builder.addInitializedInputTensor(np.float32([[[[1.0, 2.0]]]]))
    large = builder.aiOnnx.expand([w, builder.aiOnnx.constant(np.array([1, 1, 2, 2]))])
    noise = builder.aiOnnx.randomnormallike([large], scale=2.0, mean=3.0)
    uniform = builder.aiOnnx.randomuniform([1, 1, 2, 2], high=5.0, low=4.0)
    mixed = builder.aiOnnx.add([builder.aiOnnx.mul([large, noise]), uniform])
    loss = builder.aiGraphcore.identityloss([mixed], popart.ReductionType.Sum)
    every = popart.AnchorReturnType("All")
    anchors = dict.fromkeys([large, noise, uniform, "Gradient___" + w], every)
    session = session_of((builder.getModelProto(), loss), None, popart.ConstSGD(0.0), 2, anchors)
    session.weightsFromHost()
    runs = []
    for _ in range(2):
        session.setRandomSeed(7)
        runs.append(step(session))
    first = runs[0]
    assert not np.array_equal(first[noise][0], first[noise][1])
    assert all(np.array_equal(first[name], runs[1][name]) for name in anchors)
    assert first[uniform].min() >= 4 and first[uniform].max() < 5
    expected = first[noise].reshape(2, 2, 2).sum(1)
    np.testing.assert_allclose(first["Gradient___" + w].reshape(2, 2), expected, rtol=1e-5)
