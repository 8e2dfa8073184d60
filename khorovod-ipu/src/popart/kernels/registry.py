"""The table of kernels, and what a kernel sees: its node, its inputs, and the run that it is part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from popart.errors import nearest, popart_exception

__all__ = ["GRAPHCORE", "ONNX", "Inputs", "Kernel", "Node", "Operator", "Run", "find", "known_operators", "operator"]

ONNX = ""
GRAPHCORE = "ai.graphcore"

Inputs = Sequence[Any]


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes:
        op: type of the operator.
        domain: ``""`` for ONNX's own, or ``ai.graphcore``.
        name: what it is called in messages.
        inputs: ids; empty for an optional one that is left out.
        outputs: ids.
        attributes: by name, as plain values of Python or arrays.
        logits: id of what the softmax before a loss was made of, where both are differentiated as one.
    """

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    logits: str = ""


@dataclass
class Run:
    """One pass through a graph.

    Attributes:
        values: what was computed so far, by id.
        training: whether normalization and dropout behave as in training.
        generator: source of chance.
        replicas: of the graph in this process.
        assigned: new values of weights that are no matter of gradients, such as running means.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    training: bool = False
    generator: torch.Generator | None = None
    replicas: int = 1
    assigned: dict[str, torch.Tensor] = field(default_factory=dict)


Kernel = Callable[[Run, Node, Inputs], Any]


@dataclass(frozen=True)
class Operator:
    """A kernel and how it reads.

    Attributes:
        kernel: the function; returns one tensor, or one per output.
        reads: positions of inputs whose values decide about shapes.
    """

    kernel: Kernel
    reads: tuple[int, ...] = ()


_OPERATORS: dict[tuple[str, str], Operator] = {}


def operator(*names: str, domain: str = ONNX, reads: tuple[int, ...] = ()) -> Callable[[Kernel], Kernel]:
    """Register the decorated kernel under the names of its operators."""

    def register(kernel: Kernel) -> Kernel:
        for name in names:
            _OPERATORS[domain, name] = Operator(kernel, reads)
        return kernel

    return register


def find(domain: str, op: str) -> Operator:
    """Return an operator.

    Raises:
        popart_exception: the software device does not have it.
    """
    found = _OPERATORS.get((domain, op))
    if found is None:
        names = known_operators(domain)
        raise popart_exception(f"the software device has no operator {domain or 'ai.onnx'}.{op}{nearest(op, names)}")
    return found


def known_operators(domain: str = ONNX) -> list[str]:
    """Return the operators of a domain that the software device has."""
    return sorted(name for where, name in _OPERATORS if where == domain)
