"""Resize and Upsample: every axis by itself, as weighted sums of elements, which torch differentiates."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from popart.errors import popart_exception
from popart.kernels.registry import GraphNode, GraphRun, Inputs, operator
from popart.kernels.shaping import numbers
from popart.tensors import Array

__all__: list[str] = []

#: Where the middle of an element of the output lies in the input, by ``coordinate_transformation_mode``.
_COORDINATES: dict[str, Any] = {
    "half_pixel": lambda at, scale, old, new: (at + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda at, scale, old, new: (at + 0.5) / scale - 0.5 if new > 1 else at * 0,
    "align_corners": lambda at, scale, old, new: at * (old - 1) / (new - 1) if new > 1 else at * 0,
    "asymmetric": lambda at, scale, old, new: at / scale,
}
_NEAREST: dict[str, Any] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _taps(at: Array, mode: str, nearest: str) -> list[tuple[Array, Array]]:
    """Return the input elements of each output element, and their weights."""
    if mode == "nearest":
        # A quotient that is a whole number but for rounding is meant to be one.
        return [(_NEAREST[nearest](at.round(9)), np.ones_like(at))]
    low = np.floor(at)
    part = at - low
    return [(low, 1 - part), (low + 1, part)]


def _resized(
    node: GraphNode, x: torch.Tensor, sizes: list[int], scales: list[float], how: tuple[str, str]
) -> torch.Tensor:
    mode = node.attributes.get("mode") or "nearest"
    where, nearest = how
    if mode not in ("nearest", "linear") or where not in _COORDINATES or nearest not in _NEAREST:
        raise popart_exception(
            f"{node.op} {node.name!r} has mode nearest or linear (cubic is not imitated), nearest_mode of "
            f"{sorted(_NEAREST)} and coordinate_transformation_mode of {sorted(_COORDINATES)}; "
            f"received {mode!r}, {nearest!r}, {where!r}"
        )
    for axis, (new, scale) in enumerate(zip(sizes, scales, strict=True)):
        old = x.shape[axis]
        if new == old and scale == 1:
            continue
        at = _COORDINATES[where](np.arange(new, dtype=np.float64), scale, old, new)
        shape = [-1 if dim == axis else 1 for dim in range(x.dim())]
        total: Any = 0
        for places, weights in _taps(at, mode, nearest):
            chosen = torch.from_numpy(places.clip(0, old - 1).astype(np.int64)).to(x.device)
            weight = torch.from_numpy(weights.reshape(shape)).to(x.device, x.dtype)
            total = total + x.index_select(axis, chosen) * weight
        x = total
    return x


@operator("Upsample", reads=(1,))
def _upsample(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    return _by_scales(node, inputs[0], numbers(node, inputs, "scales", 1))


def _by_scales(
    node: GraphNode, x: torch.Tensor, scales: list[float], how: tuple[str, str] = ("asymmetric", "floor")
) -> torch.Tensor:
    """Without more words as operator sets up to 10 do it."""
    sizes = [int(np.floor(length * scale)) for length, scale in zip(x.shape, scales, strict=True)]
    return _resized(node, x, sizes, scales, how)


@operator("Resize", reads=(1, 2, 3))
def _resize(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x = inputs[0]
    if len(inputs) == 2:
        return _by_scales(node, x, inputs[1].tolist())
    how = (
        node.attributes.get("coordinate_transformation_mode") or "half_pixel",
        node.attributes.get("nearest_mode") or "round_prefer_floor",
    )
    if len(inputs) > 3 and inputs[3] is not None and inputs[3].numel():
        sizes = [int(size) for size in inputs[3].tolist()]
        return _resized(node, x, sizes, [new / old for new, old in zip(sizes, x.shape, strict=True)], how)
    return _by_scales(node, x, inputs[2].tolist(), how)
