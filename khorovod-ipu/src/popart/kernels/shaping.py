"""Operators that move elements, cut them out, put them together, or make them from nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from popart.errors import popart_exception
from popart.kernels.registry import Inputs, Node, Run, operator

__all__ = ["numbers"]


def numbers(node: Node, inputs: Inputs, name: str, position: int, default: Any = None) -> Any:
    """An attribute in older operator sets, an input in newer ones."""
    if name in node.attributes:
        return node.attributes[name]
    if len(inputs) > position and inputs[position] is not None:
        return inputs[position].tolist()
    return default


@operator("Constant")
def _constant(run: Run, node: Node, inputs: Inputs) -> Any:
    return torch.from_numpy(np.array(node.attributes["value"]))


@operator("ConstantOfShape", reads=(0,))
def _constant_of_shape(run: Run, node: Node, inputs: Inputs) -> Any:
    value = torch.from_numpy(np.array(node.attributes.get("value", np.zeros(1, np.float32))))
    return torch.full(inputs[0].tolist(), value.item(), dtype=value.dtype)


@operator("Shape")
def _shape(run: Run, node: Node, inputs: Inputs) -> Any:
    return torch.tensor(list(inputs[0].shape), dtype=torch.int64)


@operator("Size")
def _size(run: Run, node: Node, inputs: Inputs) -> Any:
    return torch.tensor(inputs[0].numel(), dtype=torch.int64)


@operator("Reshape", reads=(1,))
def _reshape(run: Run, node: Node, inputs: Inputs) -> Any:
    x, shape = inputs[0], inputs[1].tolist()
    return x.reshape([x.shape[i] if dim == 0 else dim for i, dim in enumerate(shape)])


@operator("Flatten")
def _flatten(run: Run, node: Node, inputs: Inputs) -> Any:
    x, axis = inputs[0], node.attributes.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]) if axis else 1, -1)


@operator("Transpose")
def _transpose(run: Run, node: Node, inputs: Inputs) -> Any:
    return inputs[0].permute(node.attributes.get("perm") or list(range(inputs[0].dim()))[::-1])


@operator("Squeeze", reads=(1,))
def _squeeze(run: Run, node: Node, inputs: Inputs) -> Any:
    axes = numbers(node, inputs, "axes", 1)
    return inputs[0].squeeze() if axes is None else inputs[0].squeeze(tuple(axes))


@operator("Unsqueeze", reads=(1,))
def _unsqueeze(run: Run, node: Node, inputs: Inputs) -> Any:
    x, axes = inputs[0], numbers(node, inputs, "axes", 1)
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Expand", reads=(1,))
def _expand(run: Run, node: Node, inputs: Inputs) -> Any:
    return inputs[0].expand(np.broadcast_shapes(tuple(inputs[0].shape), tuple(inputs[1].tolist())))


@operator("Tile", reads=(1,))
def _tile(run: Run, node: Node, inputs: Inputs) -> Any:
    return inputs[0].repeat(inputs[1].tolist())


@operator("Concat")
def _concat(run: Run, node: Node, inputs: Inputs) -> Any:
    return torch.cat(list(inputs), node.attributes["axis"])


@operator("Split", reads=(1,))
def _split(run: Run, node: Node, inputs: Inputs) -> Any:
    x, axis = inputs[0], node.attributes.get("axis", 0)
    sizes: list[int] | None = numbers(node, inputs, "split", 1)
    if not sizes and x.shape[axis] % len(node.outputs):
        raise popart_exception(f"{x.shape[axis]} elements cannot be split into {len(node.outputs)} equal parts")
    return torch.split(x, sizes or x.shape[axis] // len(node.outputs), axis)


@operator("Slice", reads=(1, 2, 3, 4))
def _slice(run: Run, node: Node, inputs: Inputs) -> Any:
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
def _pad(run: Run, node: Node, inputs: Inputs) -> Any:
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
def _gather(run: Run, node: Node, inputs: Inputs) -> Any:
    x, places = inputs
    axis = node.attributes.get("axis", 0) % x.dim()
    flat = places.reshape(-1).to(torch.int64)
    chosen = x.index_select(axis, torch.where(flat < 0, flat + x.shape[axis], flat))
    return chosen.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


@operator("Scatter", "ScatterElements")
def _scatter(run: Run, node: Node, inputs: Inputs) -> Any:
    x, places, updates = inputs
    return x.scatter(node.attributes.get("axis", 0), places.to(torch.int64), updates)


@operator("OneHot", reads=(1,))
def _one_hot(run: Run, node: Node, inputs: Inputs) -> Any:
    places, depth, values = inputs
    axis = node.attributes.get("axis", -1)
    count = int(depth.reshape(-1)[0])
    hot = torch.remainder(places.to(torch.int64), count).unsqueeze(-1) == torch.arange(count, device=places.device)
    spread = torch.where(hot, values[1], values[0])
    return spread.movedim(-1, axis) if axis not in (-1, spread.dim() - 1) else spread


@operator("DepthToSpace")
def _depth_to_space(run: Run, node: Node, inputs: Inputs) -> Any:
    return F.pixel_shuffle(inputs[0], node.attributes["blocksize"])
