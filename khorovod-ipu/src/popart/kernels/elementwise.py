"""Operators that treat each element by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from popart.kernels.registry import GRAPHCORE, Inputs, Node, Run, operator
from popart.tensors import torch_type

__all__: list[str] = []

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


def _plain(function: Callable[..., Any]) -> Callable[[Run, Node, Inputs], Any]:
    return lambda run, node, inputs: function(*inputs)


for _name, _function in {**_UNARY, **_BINARY}.items():
    operator(_name)(_plain(_function))


@operator("Identity")
def _identity(run: Run, node: Node, inputs: Inputs) -> Any:
    return inputs[0].view_as(inputs[0])


@operator("Div")
def _div(run: Run, node: Node, inputs: Inputs) -> Any:
    whole = not inputs[0].is_floating_point()
    return torch.div(inputs[0], inputs[1], rounding_mode="trunc" if whole else None)


@operator("Mod")
def _mod(run: Run, node: Node, inputs: Inputs) -> Any:
    return torch.fmod(*inputs) if node.attributes.get("fmod") else torch.remainder(*inputs)


@operator("Sum", "Mean", "Max", "Min")
def _of_several(run: Run, node: Node, inputs: Inputs) -> Any:
    pairwise = {"Max": torch.maximum, "Min": torch.minimum}.get(node.op, torch.add)
    total = functools.reduce(pairwise, inputs)
    return total / len(inputs) if node.op == "Mean" else total


@operator("Cast")
def _cast(run: Run, node: Node, inputs: Inputs) -> Any:
    return inputs[0].to(torch_type(node.attributes["to"]))


@operator("Clip")
def _clip(run: Run, node: Node, inputs: Inputs) -> Any:
    x, *limits = inputs
    lowest, highest = (*limits, None, None)[:2]
    low = node.attributes.get("min") if lowest is None else lowest
    high = node.attributes.get("max") if highest is None else highest
    return x if low is None and high is None else torch.clamp(x, low, high)


@operator("LeakyRelu")
def _leaky_relu(run: Run, node: Node, inputs: Inputs) -> Any:
    return F.leaky_relu(inputs[0], node.attributes.get("alpha", 0.01))


@operator("PRelu")
def _prelu(run: Run, node: Node, inputs: Inputs) -> Any:
    x, slope = inputs
    return torch.where(x < 0, x * slope, x)


@operator("Elu")
def _elu(run: Run, node: Node, inputs: Inputs) -> Any:
    return F.elu(inputs[0], node.attributes.get("alpha", 1.0))


@operator("Selu")
def _selu(run: Run, node: Node, inputs: Inputs) -> Any:
    alpha = node.attributes.get("alpha", 1.67326319217681884765625)
    gamma = node.attributes.get("gamma", 1.05070102214813232421875)
    return gamma * F.elu(inputs[0], alpha)


@operator("ThresholdedRelu")
def _thresholded_relu(run: Run, node: Node, inputs: Inputs) -> Any:
    return F.threshold(inputs[0], node.attributes.get("alpha", 1.0), 0.0)


@operator("HardSigmoid")
def _hard_sigmoid(run: Run, node: Node, inputs: Inputs) -> Any:
    alpha, beta = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
    return torch.clamp(inputs[0] * alpha + beta, 0.0, 1.0)


@operator("Gelu", domain=GRAPHCORE)
def _gelu(run: Run, node: Node, inputs: Inputs) -> Any:
    return F.gelu(inputs[0], approximate="tanh")


@operator("Scale", domain=GRAPHCORE)
def _scale(run: Run, node: Node, inputs: Inputs) -> Any:
    return inputs[0] * node.attributes["scale"]


@operator("Detach", domain=GRAPHCORE)
def _detach(run: Run, node: Node, inputs: Inputs) -> Any:
    return inputs[0].detach()


@operator("Nop", domain=GRAPHCORE)
def _nop(run: Run, node: Node, inputs: Inputs) -> Any:
    return inputs[0].view_as(inputs[0])
