"""The table of kernels, and their arguments: node, inputs and the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from khorovod_ipu.names import nearest
from popart.errors import popart_exception

__all__ = [
    "FIXED", "GRAPHCORE", "ONNX", "GraphNode", "GraphRun", "Inputs", "Kernel", "Operator", "compute", "find",
    "known_operators", "operator", "plain", "simple",
]  # fmt: skip

ONNX = ""
GRAPHCORE = "ai.graphcore"

Inputs = Sequence[Any]


@dataclass(frozen=True)
class GraphNode:
    """One operation of a graph.

    Attributes:
        op: type of the operator.
        domain: ``""`` for ONNX's own, or ``ai.graphcore``.
        name: name in messages.
        inputs: ids; empty for an omitted optional input.
        outputs: ids.
        attributes: plain Python values or arrays, by name.
        logits: id of the input of the softmax before a loss, if both may be differentiated as one.
        axis: axis of that softmax.
    """

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    logits: str = ""
    axis: int = 1

    @property
    def uses(self) -> list[str]:
        """Ids of all tensors that it reads."""
        return list(dict.fromkeys(name for name in (*self.inputs, self.logits) if name))


@dataclass
class GraphRun:
    """One pass through a graph.

    Attributes:
        values: the tensors computed so far, by id.
        training: whether normalization and dropout behave as in training.
        generator: random number generator.
        replicas: number of replicas of the graph in all processes.
        assigned: new values of weights without gradients, such as running means.
    """

    values: MutableMapping[str, torch.Tensor] = field(default_factory=dict)
    training: bool = False
    generator: torch.Generator | None = None
    replicas: int = 1
    assigned: dict[str, torch.Tensor] = field(default_factory=dict)


Kernel = Callable[[GraphRun, GraphNode, Inputs], Any]


@dataclass(frozen=True)
class Operator:
    """A kernel, and the inputs that it needs for shapes.

    Attributes:
        kernel: the function; returns one tensor, or one per output.
        reads: positions of inputs whose values determine shapes.
    """

    kernel: Kernel
    reads: tuple[int, ...] = ()


_OPERATORS: dict[tuple[str, str], Operator] = {}
#: Attributes that change a result, with the values that the kernels imitate, by operator and name.
FIXED: dict[str, tuple[Any, ...]] = {
    **{f"{op}.axis": () for op in ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")},
    **{f"Random{kind}.seed": () for kind in ("Normal", "NormalLike", "Uniform", "UniformLike")},
    "BatchNormalization.spatial": (1,), "ConvTranspose.auto_pad": ("NOTSET", "VALID"), "ConvTranspose.output_shape": (),
}  # fmt: skip


def operator(*names: str, domain: str = ONNX, reads: tuple[int, ...] = ()) -> Callable[[Kernel], Kernel]:
    """Register the decorated kernel under the names of its operators."""

    def register(kernel: Kernel) -> Kernel:
        for name in names:
            _OPERATORS[domain, name] = Operator(kernel, reads)
        return kernel

    return register


def simple(kernels: Mapping[str, Callable[..., Any]], domain: str = ONNX, reads: tuple[int, ...] = ()) -> None:
    """Register functions of a node's attributes and its inputs, by the names of their operators.

    Args:
        kernels: the functions.
        domain: domain of the operators.
        reads: positions of inputs whose values determine shapes.
    """

    def kernel_of(function: Callable[..., Any]) -> Kernel:
        return lambda run, node, inputs: function(node.attributes, *inputs)

    for name, function in kernels.items():
        _OPERATORS[domain, name] = Operator(kernel_of(function), reads)


def plain(kernels: Mapping[str, Callable[..., Any]], domain: str = ONNX) -> None:
    """Register functions of the inputs alone, by the names of their operators."""

    def without_attributes(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda attributes, *inputs: function(*inputs)

    simple({name: without_attributes(function) for name, function in kernels.items()}, domain)


def find(domain: str, op: str) -> Operator:
    """Return an operator.

    Raises:
        popart_exception: the software device does not have the operator.
    """
    found = _OPERATORS.get((domain, op))
    if found is None:
        names = known_operators(domain)
        raise popart_exception(f"the software device has no operator {domain or 'ai.onnx'}.{op}{nearest(op, names)}")
    return found


def compute(run: GraphRun, node: GraphNode) -> None:
    """Compute a node of a run.

    Raises:
        popart_exception: the software device does not have the operator.
    """
    inputs = [run.values[name] if name else None for name in node.inputs]
    found = find(node.domain, node.op).kernel(run, node, inputs)
    given = (found,) if isinstance(found, torch.Tensor) else found
    run.values.update({name: value for name, value in zip(node.outputs, given, strict=False) if name})


def known_operators(domain: str = ONNX) -> list[str]:
    """Return the operators of a domain that the software device has."""
    return sorted(name for where, name in _OPERATORS if where == domain)
