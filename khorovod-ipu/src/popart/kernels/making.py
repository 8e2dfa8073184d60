"""Operators that generate random or counted elements, and operators that select elements by index lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from popart.kernels.registry import GraphNode, GraphRun, Inputs, operator, simple
from popart.tensors import torch_type

__all__: list[str] = []


def _dtype(node: GraphNode, otherwise: torch.dtype = torch.float32) -> torch.dtype:
    given = node.attributes.get("dtype")
    return otherwise if given is None else torch_type(given)


def _by_chance(run: GraphRun, node: GraphNode, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return new random numbers for every micro-batch, from the session's seed; only a shape on meta tensors."""
    device = "meta" if run.generator is None else "cpu"
    kind, values = node.op.removesuffix("Like"), node.attributes
    if kind == "RandomNormal":
        scale, mean = float(values.get("scale", 1.0)), float(values.get("mean", 0.0))
        return (torch.randn(shape, generator=run.generator, device=device) * scale + mean).to(dtype)
    low, high = float(values.get("low", 0.0)), float(values.get("high", 1.0))
    return (torch.rand(shape, generator=run.generator, device=device) * (high - low) + low).to(dtype)


@operator("RandomNormal", "RandomUniform")
def _random(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    return _by_chance(run, node, tuple(node.attributes["shape"]), _dtype(node))


@operator("RandomNormalLike", "RandomUniformLike")
def _random_like(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    return _by_chance(run, node, inputs[0].shape, _dtype(node, inputs[0].dtype))


@operator("EyeLike")
def _eye_like(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    rows, columns = inputs[0].shape
    return torch.from_numpy(np.eye(rows, columns, node.attributes.get("k", 0))).to(_dtype(node, inputs[0].dtype))


@operator("DepthToSpace")
def _depth_to_space(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, block = inputs[0], node.attributes["blocksize"]
    if node.attributes.get("mode") != "CRD":  # the default has the channel after the position inside the block
        x = x.unflatten(1, (block**2, -1)).transpose(1, 2).flatten(1, 2)
    return F.pixel_shuffle(x, block)


@operator("SpaceToDepth")
def _space_to_depth(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, block = inputs[0], node.attributes["blocksize"]
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // block, block, width // block, block)
    # ONNX orders the position inside the block before the channel.
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(batch, channels * block**2, height // block, width // block)


@operator("GatherElements")
def _gather_elements(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, places = inputs
    axis = node.attributes.get("axis", 0)
    whole = places.to(torch.int64)
    return x.gather(axis, torch.where(whole < 0, whole + x.shape[axis], whole))


def _each(places: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return index lists of the first dimensions, in torch's format."""
    return tuple(place.to(torch.int64) for place in places.unbind(-1))


@operator("ReverseSequence")
def _reverse_sequence(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, lengths = inputs
    time, batch = node.attributes.get("time_axis", 0), node.attributes.get("batch_axis", 1)
    places = torch.arange(x.shape[time], device=x.device).unsqueeze(1)
    ends = lengths.to(torch.int64).unsqueeze(0)
    chosen = torch.where(places < ends, ends - 1 - places, places)
    chosen = chosen if time < batch else chosen.t()
    shape = [x.shape[axis] if axis in (time, batch) else 1 for axis in range(x.dim())]
    return x.gather(time, chosen.reshape(shape).expand(x.shape))


@operator("IsInf")
def _is_inf(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    above, below = node.attributes.get("detect_positive", 1), node.attributes.get("detect_negative", 1)
    found = inputs[0].isinf()
    return found & ((inputs[0] > 0) if above else (inputs[0] < 0)) if above != below else found & bool(above)


@operator("Shrink")
def _shrink(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, bias, lambd = inputs[0], node.attributes.get("bias", 0.0), node.attributes.get("lambd", 0.5)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


simple(
    {
        "GatherND": lambda a, x, places: x[_each(places)],
        "ScatterND": lambda a, x, places, updates: x.index_put(_each(places), updates),
    }
)
simple({"Range": lambda a, *ends: torch.arange(*(end.item() for end in ends), dtype=ends[0].dtype)}, reads=(0, 1, 2))
