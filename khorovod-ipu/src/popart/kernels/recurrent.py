"""LSTM, GRU and plain recurrent layers, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from popart.errors import popart_exception
from popart.kernels.registry import GraphNode, GraphRun, Inputs, operator

__all__: list[str] = []

Tensor = torch.Tensor
_Step = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}
#: ONNX's attributes that the device's layers do not support.
_NOT_HERE = ("activation_alpha", "activation_beta", "clip", "input_forget")


@dataclass
class _Direction:
    """One direction of a layer.

    Attributes:
        weight: weights of the input, gates times hidden by input.
        recurrence: weights of the state, gates times hidden by hidden.
        biases: biases of input and state, gates times hidden each.
        functions: activation functions, in ONNX's order.
        attributes: attributes of the node.
    """

    weight: Tensor
    recurrence: Tensor
    biases: tuple[Tensor, Tensor]
    functions: list[Callable[[Tensor], Tensor]]
    attributes: Any


def _of_lstm(d: _Direction) -> _Step:
    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, cell = state
        # ONNX's order of the gates: input, output, forget, cell.
        i, o, f, c = (x + F.linear(hidden, d.recurrence, d.biases[1])).chunk(4, -1)
        gate, of_cell, of_output = d.functions
        cell = gate(f) * cell + gate(i) * of_cell(c)
        return gate(o) * of_output(cell), cell

    return step


def _of_gru(d: _Direction) -> _Step:
    size = d.recurrence.shape[-1]

    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = state
        # ONNX's order of the gates: update, reset, hidden.
        z, r, h = x.chunk(3, -1)
        first = F.linear(hidden, d.recurrence[: 2 * size], d.biases[1][: 2 * size])
        gate, of_new = d.functions
        update, reset = gate(z + first[..., :size]), gate(r + first[..., size:])
        last, bias = d.recurrence[2 * size :], d.biases[1][2 * size :]
        if d.attributes.get("linear_before_reset"):
            new = reset * F.linear(hidden, last, bias)
        else:
            new = F.linear(reset * hidden, last, bias)
        return ((1 - update) * of_new(h + new) + update * hidden,)

    return step


def _of_rnn(d: _Direction) -> _Step:
    return lambda x, state: (d.functions[0](x + F.linear(state[0], d.recurrence, d.biases[1])),)


def _functions(node: GraphNode, default: list[str], directions: int) -> list[list[Callable[[Tensor], Tensor]]]:
    """Return the activation functions of each direction."""
    names = node.attributes.get("activations") or default * directions
    unknown = [name for name in names if name.lower() not in _ACTIVATIONS]
    others = [name for name in _NOT_HERE if node.attributes.get(name)] + ["peepholes"] * bool(node.inputs[7:8] > ("",))
    if unknown or others or len(names) != len(default) * directions:
        raise popart_exception(
            f"{node.op} {node.name!r} takes {len(default)} activations per direction, of {sorted(_ACTIVATIONS)}, and "
            f"no peepholes, {', '.join(_NOT_HERE)}; received {names}{' and ' if others else ''}{', '.join(others)}"
        )
    found = [_ACTIVATIONS[name.lower()] for name in names]
    return [found[start : start + len(default)] for start in range(0, len(found), len(default))]


def _run_layer(node: GraphNode, inputs: Inputs, gates: int, default: list[str], step_of: Callable[..., _Step]) -> Any:
    x, weight, recurrence, *more = inputs
    given = [*more, *[None] * (5 - len(more))]
    bias, lengths, starts = given[0], given[1], given[2 : 3 + (gates == 4)]
    how = node.attributes.get("direction") or "forward"
    reversals = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[how]
    size, batch = recurrence.shape[-1], x.shape[1]
    expected = (len(reversals), gates * size, x.shape[-1])
    if node.attributes.get("hidden_size") not in (None, size) or tuple(weight.shape) != expected:
        raise popart_exception(
            f"{node.op} {node.name!r}, {how}: weights of {expected} for an input of {x.shape[-1]} and hidden_size="
            f"{size}; received {tuple(weight.shape)} and hidden_size={node.attributes.get('hidden_size')}"
        )
    functions = _functions(node, default, len(reversals))
    rows, lasts = [], []
    for place, backwards in enumerate(reversals):
        both = bias[place] if bias is not None else x.new_zeros(2 * gates * size)
        own = _Direction(weight[place], recurrence[place], both.chunk(2), functions[place], node.attributes)
        state = tuple(x.new_zeros(batch, size) if start is None else start[place] for start in starts)
        row, last = _through_time(x, own, step_of(own), state, lengths, backwards)
        rows.append(row)
        lasts.append(last)
    whole = torch.stack(rows, 1)
    return (whole, *(torch.stack(parts) for parts in zip(*lasts, strict=True)))[: len(node.outputs)]


def _through_time(
    x: Tensor, own: _Direction, step: _Step, state: tuple[Tensor, ...], lengths: Any, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of all time steps, 0 after a sequence's end, and the last state."""
    fed = F.linear(x, own.weight, own.biases[0])
    found: list[Tensor] = []
    times = range(x.shape[0])
    for time in reversed(times) if backwards else times:
        new = step(fed[time], state)
        output = new[0]
        if lengths is not None:
            inside = (time < lengths).unsqueeze(-1)
            new = tuple(torch.where(inside, now, before) for now, before in zip(new, state, strict=True))
            output = torch.where(inside, output, torch.zeros_like(output))
        state = new
        found.append(output)
    return torch.stack(found[::-1] if backwards else found), state


_LAYERS = {"LSTM": (4, ["Sigmoid", "Tanh", "Tanh"], _of_lstm), "GRU": (3, ["Sigmoid", "Tanh"], _of_gru),
           "RNN": (1, ["Tanh"], _of_rnn)}  # fmt: skip


@operator(*_LAYERS)
def _recurrent(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    return _run_layer(node, inputs, *_LAYERS[node.op])
