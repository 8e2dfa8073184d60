"""The operators, computed in torch, which differentiates them. ``find`` gives the kernel of an operator."""

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
from popart.kernels.registry import GraphNode, GraphRun, Kernel, Subgraph, compute, find, known_operators

__all__ = ["GraphNode", "GraphRun", "Kernel", "Subgraph", "compute", "find", "known_operators"]

_LOADED = (
    control, elementwise, graphcore, losses, making, neural, normalization, recurrent, reducing, resizing, shaping,
)  # fmt: skip
