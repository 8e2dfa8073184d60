"""Operators that move, slice, join or create elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from popart.errors import popart_exception
from popart.kernels.registry import GraphNode, GraphRun, Inputs, operator, simple

__all__ = ["numbers"]


def numbers(node: GraphNode, inputs: Inputs, name: str, position: int, default: Any = None) -> Any:
    """Return numbers from an attribute (older operator sets) or from an input (newer ones)."""
    if name in node.attributes:
        return node.attributes[name]
    if len(inputs) > position and inputs[position] is not None:
        return inputs[position].tolist()
    return default


@operator("Squeeze", reads=(1,))
def _squeeze(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    axes = numbers(node, inputs, "axes", 1)
    return inputs[0].squeeze() if axes is None else inputs[0].squeeze(tuple(axes))


@operator("Unsqueeze", reads=(1,))
def _unsqueeze(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, axes = inputs[0], numbers(node, inputs, "axes", 1)
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Split", reads=(1,))
def _split(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, axis = inputs[0], node.attributes.get("axis", 0)
    sizes: list[int] | None = numbers(node, inputs, "split", 1)
    if not sizes and x.shape[axis] % len(node.outputs):
        raise popart_exception(f"{x.shape[axis]} elements cannot be split into {len(node.outputs)} equal parts")
    return torch.split(x, sizes or x.shape[axis] // len(node.outputs), axis)


@operator("Slice", reads=(1, 2, 3, 4))
def _slice(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x = inputs[0]
    starts, ends = numbers(node, inputs, "starts", 1), numbers(node, inputs, "ends", 2)
    axes = numbers(node, inputs, "axes", 3) or list(range(len(starts)))
    steps = numbers(node, inputs, "steps", 4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step > 0:
            places = range(*slice(start, end, step).indices(x.shape[axis]))
            x = x[(slice(None),) * (axis % x.dim()) + (slice(places.start, max(places.stop, places.start), step),)]
        else:
            last = None if end < -x.shape[axis] else end
            chosen = list(range(*slice(start, last, step).indices(x.shape[axis])))
            x = x.index_select(axis, torch.tensor(chosen, dtype=torch.int64, device=x.device))
    return x


@operator("Pad", reads=(1, 2))
def _pad(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, pads = inputs[0], numbers(node, inputs, "pads", 1)
    mode = node.attributes.get("mode", "constant")
    value = numbers(node, inputs, "value", 2, 0.0)
    ends = [(pads[axis], pads[axis + x.dim()]) for axis in reversed(range(x.dim()))]
    flat = [amount for pair in ends for amount in pair]
    if mode == "constant":
        return F.pad(x, flat, value=value[0] if isinstance(value, list) else value)
    for axis, (before, after) in zip(reversed(range(x.dim())), ends, strict=True):
        places = np.pad(np.arange(x.shape[axis]), (before, after), mode)
        x = x.index_select(axis, torch.from_numpy(places).to(x.device))
    return x


@operator("Gather")
def _gather(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, places = inputs
    axis = node.attributes.get("axis", 0) % x.dim()
    flat = places.reshape(-1).to(torch.int64)
    chosen = x.index_select(axis, torch.where(flat < 0, flat + x.shape[axis], flat))
    return chosen.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


@operator("OneHot", reads=(1,))
def _one_hot(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    places, depth, values = inputs
    axis = node.attributes.get("axis", -1)
    count = int(depth.reshape(-1)[0])
    hot = places.to(torch.int64).unsqueeze(-1) == torch.arange(count, device=places.device)  # none outside of the range
    spread = torch.where(hot, values[1], values[0])
    return spread.movedim(-1, axis) if axis not in (-1, spread.dim() - 1) else spread


def _filled(attributes: Any, shape: torch.Tensor) -> torch.Tensor:
    value = torch.from_numpy(np.array(attributes.get("value", np.zeros(1, np.float32))))
    return torch.full(shape.tolist(), value.item(), dtype=value.dtype)


def _reshaped(attributes: Any, x: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    return x.reshape([x.shape[i] if dim == 0 else dim for i, dim in enumerate(shape.tolist())])


simple(
    {
        "Constant": lambda a: torch.from_numpy(np.array(a["value"])),
        "Shape": lambda a, x: torch.tensor(list(x.shape), dtype=torch.int64),
        "Size": lambda a, x: torch.tensor(x.numel(), dtype=torch.int64),
        "Flatten": lambda a, x: x.reshape(math.prod(x.shape[: a.get("axis", 1)]) if a.get("axis", 1) else 1, -1),
        "Transpose": lambda a, x: x.permute(a.get("perm") or list(range(x.dim()))[::-1]),
        "Concat": lambda a, *inputs: torch.cat(list(inputs), a["axis"]),
        **dict.fromkeys(
            ("Scatter", "ScatterElements"),
            lambda a, x, places, updates: x.scatter(a.get("axis", 0), places.to(torch.int64), updates),
        ),
    }
)
simple(
    {
        "Reshape": _reshaped,
        "Expand": lambda a, x, to: x.expand(np.broadcast_shapes(tuple(x.shape), tuple(to.tolist()))),
        "Tile": lambda a, x, times: x.repeat(times.tolist()),
    },
    reads=(1,),
)
simple({"ConstantOfShape": _filled}, reads=(0,))
