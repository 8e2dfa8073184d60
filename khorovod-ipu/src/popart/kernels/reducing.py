"""Operators that combine the elements of a tensor, and products of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from popart.kernels.registry import GraphNode, GraphRun, Inputs, operator, plain, simple
from popart.kernels.shaping import numbers

__all__: list[str] = []


@operator("Gemm")
def _gemm(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    a, b, *rest = inputs
    a = a.t() if node.attributes.get("transA") else a
    b = b.t() if node.attributes.get("transB") else b
    product = node.attributes.get("alpha", 1.0) * (a @ b)
    return product + node.attributes.get("beta", 1.0) * rest[0] if rest and rest[0] is not None else product


def _prod(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


_REDUCTIONS: dict[str, Callable[[Any, Any, bool], Any]] = {
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _prod,
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: x.logsumexp(axes, keepdim=keep),
}


@operator(*_REDUCTIONS, reads=(1,))
def _reduce(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, axes = inputs[0], numbers(node, inputs, "axes", 1)
    axes = list(range(x.dim())) if axes is None else axes
    if not axes:  # ONNX: an empty list reduces each element alone, but torch would reduce all
        return _REDUCTIONS[node.op](x.unsqueeze(-1), [-1], False)
    return _REDUCTIONS[node.op](x, axes, bool(node.attributes.get("keepdims", 1))).to(x.dtype)  # torch widens int32


@operator("ArgMax", "ArgMin")
def _place(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    find = torch.argmax if node.op == "ArgMax" else torch.argmin
    return find(inputs[0], dim=node.attributes.get("axis", 0), keepdim=bool(node.attributes.get("keepdims", 1)))


@operator("TopK", reads=(1,))
def _topk(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    count = numbers(node, inputs, "k", 1)
    count = count[0] if isinstance(count, list) else count
    largest = bool(node.attributes.get("largest", 1))
    values, places = torch.topk(inputs[0], int(count), dim=node.attributes.get("axis", -1), largest=largest)
    return values, places


@operator("CumSum", reads=(1,))
def _cumsum(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    axis = int(inputs[1].reshape(-1)[0])
    x = inputs[0].flip(axis) if node.attributes.get("reverse") else inputs[0]
    total = torch.cumsum(x, axis, dtype=x.dtype)
    total = total - x if node.attributes.get("exclusive") else total
    return total.flip(axis) if node.attributes.get("reverse") else total


def _over_rows(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Apply a function to rows: before operator set 13, the axis splits the dimensions into rows and columns."""

    def of_matrix(attributes: Any, x: torch.Tensor) -> torch.Tensor:
        axis = attributes.get("axis", 1) % max(x.dim(), 1)
        return function(x.reshape(math.prod(x.shape[:axis]), -1), 1).reshape(x.shape)

    return of_matrix


def _hardmax(rows: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.zeros_like(rows).scatter(dim, rows.argmax(dim, keepdim=True), 1.0)


plain({"MatMul": torch.matmul})
simple(
    {"Softmax": _over_rows(torch.softmax), "LogSoftmax": _over_rows(torch.log_softmax), "Hardmax": _over_rows(_hardmax)}
)
