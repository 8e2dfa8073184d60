"""Normalization: over the batch, over groups of channels, over instances, across channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from popart.kernels.registry import GRAPHCORE, GraphNode, GraphRun, Inputs, operator, simple

__all__: list[str] = []


def _by_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *([1] * (x.dim() - 2)))


@operator("BatchNormalization")
def _batch_normalization(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    """Normalize; with five outputs, in training, use the batch's statistics and update the running ones."""
    x, scale, shift, mean, variance = inputs
    epsilon, momentum = node.attributes.get("epsilon", 1e-5), node.attributes.get("momentum", 0.9)
    outputs: tuple[Any, ...] = (mean, variance, mean, variance)
    if run.training and len(node.outputs) > 1 and not node.attributes.get("is_test"):
        axes = [axis for axis in range(x.dim()) if axis != 1]
        found_mean, found_variance = x.mean(axes), x.var(axes, unbiased=False)
        outputs = (
            mean * momentum + found_mean.detach() * (1 - momentum),
            variance * momentum + found_variance.detach() * (1 - momentum),
            found_mean.detach(),
            found_variance.detach(),
        )
        run.assigned[node.inputs[3]], run.assigned[node.inputs[4]] = outputs[0].detach(), outputs[1].detach()
        mean, variance = found_mean, found_variance
    y = (x - _by_channel(mean, x)) * torch.rsqrt(_by_channel(variance, x) + epsilon)
    y = y * _by_channel(scale, x) + _by_channel(shift, x)
    return (y, *outputs)[: len(node.outputs)]


@operator("GroupNormalization", domain=GRAPHCORE)
def _group_normalization(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    """Normalize over groups of channels; one group is layer normalization."""
    x, scale, shift = inputs
    groups, epsilon = int(node.attributes["num_groups"]), node.attributes.get("epsilon", 1e-5)
    y = F.group_norm(x, groups, scale, shift, epsilon)
    rows = x.reshape(x.shape[0], groups, -1).detach()
    mean, spread = rows.mean(-1), torch.rsqrt(rows.var(-1, unbiased=False) + epsilon)
    return (y, mean.reshape(-1), spread.reshape(-1))[: len(node.outputs)]


@operator("LRN")
def _local_response(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    """Normalize across channels; torch's version divides differently at borders, and has another window center."""
    x, size = inputs[0], node.attributes["size"]
    alpha, beta = node.attributes.get("alpha", 1e-4), node.attributes.get("beta", 0.75)
    before, after = (size - 1) // 2, size // 2
    channels = x.shape[1]
    squares = F.pad(x.square(), [0, 0] * (x.dim() - 2) + [before, after])
    total = sum(squares[:, start : start + channels] for start in range(size))
    return x / (node.attributes.get("bias", 1.0) + alpha / size * total) ** beta


def _mean_variance(attributes: Any, x: torch.Tensor) -> torch.Tensor:
    axes = attributes.get("axes") or [0, 2, 3]
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.square().mean(axes, keepdim=True).sqrt() + 1e-9)


simple(
    {
        "InstanceNormalization": lambda a, x, scale, shift: F.instance_norm(
            x, weight=scale, bias=shift, eps=a.get("epsilon", 1e-5)
        ),
        "LpNormalization": lambda a, x: x / x.norm(a.get("p", 2), a.get("axis", -1), keepdim=True),
        "MeanVarianceNormalization": _mean_variance,
    }
)
