"""What each operator computes, in torch, which differentiates it. ``find`` gives the kernel of an operator."""

from __future__ import annotations

from popart.kernels import (
    control,
    elementwise,
    graphcore,
    losses,
    making,
    neural,
    normalization,
    recurrent,
    reducing,
    resizing,
    shaping,
)
from popart.kernels.registry import Kernel, Node, Run, Subgraph, compute, find, known_operators

__all__ = ["Kernel", "Node", "Run", "Subgraph", "compute", "find", "known_operators"]

_LOADED = (
    control, elementwise, graphcore, losses, making, neural, normalization, recurrent, reducing, resizing, shaping,
)  # fmt: skip
