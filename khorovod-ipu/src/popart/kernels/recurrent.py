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

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softsign": F.softsign,
    "softplus": F.softplus,
    "affine": lambda x: x,
    "hardsigmoid": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "elu": F.elu,
    "leakyrelu": F.leaky_relu,
}


@dataclass
class _Direction:
    """One direction of a layer.

    Attributes:
        weight: for what comes in, gates times hidden by input.
        recurrence: for the state, gates times hidden by hidden.
        biases: of both, gates times hidden each.
        peepholes: from the cell to the gates, or None.
        functions: activations, in ONNX's order.
        clip: bound of what goes into an activation, or None.
        attributes: of the node.
    """

    weight: Tensor
    recurrence: Tensor
    biases: tuple[Tensor, Tensor]
    peepholes: Tensor | None
    functions: list[Callable[[Tensor], Tensor]]
    clip: float | None
    attributes: Any

    def act(self, which: int, x: Tensor) -> Tensor:
        """Apply an activation to a clipped value."""
        return self.functions[which](x if self.clip is None else x.clamp(-self.clip, self.clip))


def _of_lstm(d: _Direction) -> _Step:
    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, cell = state
        # ONNX's order of the gates: input, output, forget, cell.
        i, o, f, c = (x + F.linear(hidden, d.recurrence, d.biases[1])).chunk(4, -1)
        from_cell = d.peepholes.chunk(3) if d.peepholes is not None else (0.0, 0.0, 0.0)
        gate = d.act(0, i + from_cell[0] * cell)
        forget = 1 - gate if d.attributes.get("input_forget") else d.act(0, f + from_cell[2] * cell)
        cell = forget * cell + gate * d.act(1, c)
        return d.act(0, o + from_cell[1] * cell) * d.functions[2](cell), cell

    return step


def _of_gru(d: _Direction) -> _Step:
    size = d.recurrence.shape[-1]

    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = state
        # ONNX's order of the gates: update, reset, hidden.
        z, r, h = x.chunk(3, -1)
        first = F.linear(hidden, d.recurrence[: 2 * size], d.biases[1][: 2 * size])
        update, reset = d.act(0, z + first[..., :size]), d.act(0, r + first[..., size:])
        last, bias = d.recurrence[2 * size :], d.biases[1][2 * size :]
        if d.attributes.get("linear_before_reset"):
            new = reset * F.linear(hidden, last, bias)
        else:
            new = F.linear(reset * hidden, last, bias)
        return ((1 - update) * d.act(1, h + new) + update * hidden,)

    return step


def _of_rnn(d: _Direction) -> _Step:
    return lambda x, state: (d.act(0, x + F.linear(state[0], d.recurrence, d.biases[1])),)


def _functions(node: GraphNode, default: list[str], directions: int) -> list[list[Callable[[Tensor], Tensor]]]:
    """Activations of each direction."""
    names = node.attributes.get("activations") or default * directions
    unknown = [name for name in names if name.lower() not in _ACTIVATIONS]
    numbers = [name for name in ("activation_alpha", "activation_beta") if node.attributes.get(name)]
    if unknown or numbers or len(names) != len(default) * directions:
        raise popart_exception(
            f"{node.op} {node.name!r} takes {len(default)} activations per direction, of {sorted(_ACTIVATIONS)}, with "
            f"their default parameters; received {names}{' and ' if numbers else ''}{', '.join(numbers)}"
        )
    found = [_ACTIVATIONS[name.lower()] for name in names]
    return [found[start : start + len(default)] for start in range(0, len(found), len(default))]


def _run_layer(node: GraphNode, inputs: Inputs, gates: int, default: list[str], step_of: Callable[..., _Step]) -> Any:
    x, weight, recurrence, *more = inputs
    given = [*more, *[None] * (5 - len(more))]
    bias, lengths, peepholes, starts = given[0], given[1], given[4], given[2 : 3 + (gates == 4)]
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
        peeped = peepholes[place] if peepholes is not None else None
        clip = node.attributes.get("clip") or None
        own = _Direction(
            weight[place], recurrence[place], both.chunk(2), peeped, functions[place], clip, node.attributes
        )
        state = tuple(x.new_zeros(batch, size) if start is None else start[place] for start in starts)
        row, last = _through_time(x, own, step_of(own), state, lengths, backwards)
        rows.append(row)
        lasts.append(last)
    whole = torch.stack(rows, 1)
    return (whole, *(torch.stack(parts) for parts in zip(*lasts, strict=True)))[: len(node.outputs)]


def _through_time(
    x: Tensor, own: _Direction, step: _Step, state: tuple[Tensor, ...], lengths: Any, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of all times, 0 behind a sequence's end, and the last state."""
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


@operator("LSTM")
def _lstm(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    return _run_layer(node, inputs, 4, ["Sigmoid", "Tanh", "Tanh"], _of_lstm)


@operator("GRU")
def _gru(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    return _run_layer(node, inputs, 3, ["Sigmoid", "Tanh"], _of_gru)


@operator("RNN")
def _rnn(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    return _run_layer(node, inputs, 1, ["Tanh"], _of_rnn)
