"""Operators of ``ai.graphcore`` that are neither losses nor normalization."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from popart.errors import popart_exception
from popart.kernels.registry import GRAPHCORE, GraphNode, GraphRun, Inputs, operator, plain, simple

__all__: list[str] = []

_PLAIN: dict[str, Any] = {
    "Atan2": torch.atan2, "Expm1": torch.expm1, "Log1p": torch.log1p, "Fmod": torch.fmod,
    "Remainder": torch.remainder, "Round": torch.round, "NearbyInt": torch.round, "Swish": F.silu,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
    "BitwiseNot": torch.bitwise_not,
}  # fmt: skip


@operator("Slice", domain=GRAPHCORE)
def _slice(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, starts, ends = inputs[0], node.attributes["starts"], node.attributes["ends"]
    for axis, start, end in zip(node.attributes.get("axes") or range(len(starts)), starts, ends, strict=True):
        x = x[(slice(None),) * (axis % x.dim()) + (slice(start, end),)]
    return x


@operator("ShapedDropout", domain=GRAPHCORE)
def _shaped_dropout(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    """Apply dropout with a mask of a given shape, broadcast over the tensor."""
    x, ratio = inputs[0], node.attributes.get("ratio", 0.5)
    if not run.training or x.is_meta:
        return x * torch.ones(node.attributes["shape"], dtype=x.dtype, device=x.device)
    return x * (torch.rand(node.attributes["shape"], generator=run.generator) >= ratio) / (1 - ratio)


def _place(node: GraphNode, x: torch.Tensor, where: torch.Tensor) -> tuple[slice, ...]:
    """Return the part that a dynamic operator selects: a tensor holds its start; its size is known."""
    axes, sizes = node.attributes["axes"], node.attributes["sizes"]
    starts = [0] * len(axes) if where.is_meta else [int(start) for start in where.reshape(-1).tolist()]
    if len(starts) != len(axes) or len(sizes) != len(axes):
        raise popart_exception(
            f"{node.op} {node.name!r} takes a start and a size for each of the axes {list(axes)}; received "
            f"{len(starts)} starts and the sizes {list(sizes)}"
        )
    places = [slice(None)] * x.dim()
    for axis, start, size in zip(axes, starts, sizes, strict=True):
        if not 0 <= start <= x.shape[axis] - size:
            raise popart_exception(
                f"{node.op} {node.name!r}: {size} elements from {start} on are not inside of dimension {axis}, which "
                f"has {x.shape[axis]}"
            )
        places[axis] = slice(start, start + size)
    return tuple(places)


@operator("DynamicSlice", domain=GRAPHCORE)
def _dynamic_slice(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, where = inputs
    return x[_place(node, x, where)]


@operator("DynamicUpdate", "DynamicAdd", "DynamicZero", domain=GRAPHCORE)
def _dynamic_update(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, where, *given = inputs
    places = _place(node, x, where)
    fresh = x.clone()
    if node.op == "DynamicZero":
        fresh[places] = 0
    elif node.op == "DynamicAdd":
        fresh[places] = x[places] + given[0]
    else:
        fresh[places] = given[0]
    return fresh


@operator("PrintTensor", domain=GRAPHCORE)
def _print(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x = inputs[0].view_as(inputs[0])
    if x.is_meta:
        return x
    title = node.attributes.get("title") or node.inputs[0]
    _show(title, x)
    if node.attributes.get("print_gradient", 1) and x.requires_grad:
        x.register_hook(lambda gradient: _show(f"{title}_gradient", gradient))
    return x


def _show(title: str, value: torch.Tensor) -> None:
    print(f"{title}: {value.detach().tolist()}", file=sys.stderr, flush=True)


plain(_PLAIN, GRAPHCORE)
simple(
    {
        "IncrementMod": lambda a, x: torch.remainder(x + a["increment"], a["modulus"]).to(x.dtype),
        "Reverse": lambda a, x: x.flip(a["dimensions"]),
        "Reshape": lambda a, x: x.reshape(a["shape"]),
        "Subsample": lambda a, x: x[tuple(slice(None, None, stride) for stride in a["strides"])],
    },
    GRAPHCORE,
)
