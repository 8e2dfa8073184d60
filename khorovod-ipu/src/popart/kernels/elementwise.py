"""Operators that treat each element by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from popart.kernels.registry import GRAPHCORE, GraphNode, GraphRun, Inputs, operator, plain, simple
from popart.tensors import torch_type

__all__: list[str] = []

_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875

_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "IsNaN": torch.isnan, "Log": torch.log,
    "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh,
    "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Pow": torch.pow, "Equal": torch.eq, "Less": torch.lt,
    "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "Where": torch.where,
}  # fmt: skip


@operator("Div")
def _div(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    whole = not inputs[0].is_floating_point()
    return torch.div(inputs[0], inputs[1], rounding_mode="trunc" if whole else None)


@operator("Sum", "Mean", "Max", "Min")
def _of_several(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    pairwise = {"Max": torch.maximum, "Min": torch.minimum}.get(node.op, torch.add)
    total = functools.reduce(pairwise, inputs)
    return total / len(inputs) if node.op == "Mean" else total


@operator("Clip")
def _clip(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    x, *limits = inputs
    lowest, highest = (*limits, None, None)[:2]
    low = node.attributes.get("min") if lowest is None else lowest
    high = node.attributes.get("max") if highest is None else highest
    return x if low is None and high is None else torch.clamp(x, low, high)


plain({**_UNARY, **_BINARY})
simple(
    {
        "Identity": lambda a, x: x.view_as(x),
        "Mod": lambda a, x, y: torch.fmod(x, y) if a.get("fmod") else torch.remainder(x, y),
        "Cast": lambda a, x: x.to(torch_type(a["to"])),
        "LeakyRelu": lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)),
        "PRelu": lambda a, x, slope: torch.where(x < 0, x * slope, x),
        "Elu": lambda a, x: F.elu(x, a.get("alpha", 1.0)),
        "Selu": lambda a, x: a.get("gamma", _SELU_GAMMA) * F.elu(x, a.get("alpha", _SELU_ALPHA)),
        "ThresholdedRelu": lambda a, x: F.threshold(x, a.get("alpha", 1.0), 0.0),
        "HardSigmoid": lambda a, x: torch.clamp(x * a.get("alpha", 0.2) + a.get("beta", 0.5), 0.0, 1.0),
    }
)
simple(
    {
        "Gelu": lambda a, x: F.gelu(x, approximate="tanh"),
        "Scale": lambda a, x: x * a["scale"],
        "Detach": lambda a, x: x.detach(),
        "Nop": lambda a, x: x.view_as(x),
    },
    GRAPHCORE,
)
