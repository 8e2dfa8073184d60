"""Convolution, pooling, dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from popart.errors import popart_exception
from popart.kernels.registry import GraphNode, GraphRun, Inputs, operator, simple

__all__: list[str] = []

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _padding(node: GraphNode, size: Any, kernel: Any, strides: Any, dilations: Any) -> list[tuple[int, int]]:
    """Return the padding before and after each spatial dimension."""
    rank, how = len(kernel), node.attributes.get("auto_pad", "NOTSET")
    if how in ("NOTSET", ""):
        pads = node.attributes.get("pads") or [0] * (2 * rank)
        return [(pads[i], pads[i + rank]) for i in range(rank)]
    if how == "VALID":
        return [(0, 0)] * rank
    found = []
    for length, window, stride, dilation in zip(size, kernel, strides, dilations, strict=True):
        total = max((math.ceil(length / stride) - 1) * stride + dilation * (window - 1) + 1 - length, 0)
        less, more = total // 2, total - total // 2
        found.append((less, more) if how == "SAME_UPPER" else (more, less))
    return found


def _flat(pads: list[tuple[int, int]]) -> list[int]:
    return [amount for pair in reversed(pads) for amount in pair]


def _spatial(node: GraphNode, x: torch.Tensor, kernel: Any) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    rank = len(kernel)
    if x.dim() != rank + 2 or rank not in _CONV:
        raise popart_exception(
            f"{node.op} {node.name!r} has a kernel of {list(kernel)} and takes batch, channels and {rank} dimensions, "
            f"1 to 3 of them; received the shape {list(x.shape)}"
        )
    strides = node.attributes.get("strides") or [1] * rank
    dilations = node.attributes.get("dilations") or [1] * rank
    return strides, dilations, _padding(node, x.shape[2:], kernel, strides, dilations)


@operator("Conv")
def _conv(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, weight, *rest = inputs
    strides, dilations, pads = _spatial(node, x, weight.shape[2:])
    x = F.pad(x, _flat(pads)) if any(map(any, pads)) else x
    bias = rest[0] if rest else None
    function = _CONV[weight.dim() - 2]
    return function(x, weight, bias, tuple(strides), 0, tuple(dilations), node.attributes.get("group", 1))


@operator("ConvTranspose")
def _conv_transpose(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, weight, *rest = inputs
    rank = weight.dim() - 2
    strides, dilations, pads = _spatial(node, x, weight.shape[2:])
    extra = node.attributes.get("output_padding") or [0] * rank
    y = _CONV_TRANSPOSE[rank](
        x, weight, rest[0] if rest else None, strides, 0, extra, node.attributes.get("group", 1), dilations
    )
    return F.pad(y, [-amount for amount in _flat(pads)])


@operator("MaxPool")
def _max_pool(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    if len(node.outputs) > 1:
        raise popart_exception(f"the software device does not give the indices of MaxPool {node.name!r}; num_outputs=1")
    x, kernel = inputs[0], node.attributes["kernel_shape"]
    strides, dilations, pads = _spatial(node, x, kernel)
    x = F.pad(x, _flat(pads), value=-math.inf) if any(map(any, pads)) else x
    return _MAX_POOL[len(kernel)](x, kernel, strides, 0, dilations, bool(node.attributes.get("ceil_mode")))


@operator("AveragePool")
def _average_pool(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, kernel = inputs[0], node.attributes["kernel_shape"]
    strides, _, pads = _spatial(node, x, kernel)
    ceil = bool(node.attributes.get("ceil_mode"))
    functions: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
    pool = functions[len(kernel)]
    mean = pool(F.pad(x, _flat(pads)), kernel, strides, 0, ceil)
    if node.attributes.get("count_include_pad") or not any(map(any, pads)):
        return mean
    share = pool(F.pad(torch.ones_like(x), _flat(pads)), kernel, strides, 0, ceil)  # without padding
    return mean / share


@operator("Dropout")
def _dropout(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x = inputs[0]
    ratio = node.attributes.get("ratio", 0.5) if len(inputs) < 2 or inputs[1] is None else inputs[1]
    if not run.training or x.is_meta or node.attributes.get("is_test"):
        mask = torch.ones_like(x, dtype=torch.bool)
        return (x.view_as(x), mask)[: len(node.outputs)]
    mask = torch.rand(x.shape, generator=run.generator) >= ratio
    return (x * mask / (1 - ratio), mask)[: len(node.outputs)]


simple(
    {
        "GlobalAveragePool": lambda a, x: x.mean(dim=tuple(range(2, x.dim())), keepdim=True),
        "GlobalMaxPool": lambda a, x: x.amax(dim=tuple(range(2, x.dim())), keepdim=True),
    }
)
