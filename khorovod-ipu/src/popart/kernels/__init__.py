"""The operators, computed in torch, which differentiates them. ``find`` gives the kernel of an operator."""

from popart.kernels import elementwise, graphcore, losses, making, neural, normalization, recurrent, reducing, shaping
from popart.kernels.registry import FIXED, GraphNode, GraphRun, Kernel, compute, find, known_operators

__all__ = ["FIXED", "GraphNode", "GraphRun", "Kernel", "compute", "find", "known_operators"]

_LOADED = (
    elementwise, graphcore, losses, making, neural, normalization, recurrent, reducing, shaping,
)  # fmt: skip
