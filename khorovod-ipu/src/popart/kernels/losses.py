"""Losses of ``ai.graphcore``, with PopART's gradients."""

from __future__ import annotations

from typing import Any

import torch

from popart.errors import popart_exception
from popart.kernels.registry import GRAPHCORE, GraphNode, GraphRun, Inputs, operator, simple

__all__: list[str] = []

#: Lower bound of a probability in the logarithm, by dtype; the gradient's divisor has another bound.
_LEAST = {torch.float16: 6.104e-05}
_LEAST_OTHERWISE = 1e-7
_LEAST_DIVISOR = 1e-10


def _reduced(attributes: Any, x: torch.Tensor, count: Any = None) -> torch.Tensor:
    how = attributes.get("reduction", "Mean")
    if how == "NoReduction":
        return x
    return x.sum() if how == "Sum" else x.sum() / (x.numel() if count is None else count)


class _NegativeLogLikelihood(torch.autograd.Function):
    """Loss of probabilities: ``-log(max(p, least))`` at the label; its gradient there is ``-1 / max(p, 1e-10)``."""

    @staticmethod
    def forward(ctx: Any, probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        at_label = probabilities.gather(1, labels.unsqueeze(1))
        ctx.save_for_backward(at_label, labels)
        ctx.shape = probabilities.shape
        return -torch.log(at_label.clamp_min(_LEAST.get(probabilities.dtype, _LEAST_OTHERWISE))).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = upstream
        at_label, labels = ctx.saved_tensors
        slope = -gradient.unsqueeze(1) / at_label.clamp_min(_LEAST_DIVISOR)
        return gradient.new_zeros(ctx.shape).scatter(1, labels.unsqueeze(1), slope), None


class _SoftmaxCrossEntropy(torch.autograd.Function):
    """The same loss, differentiated together with the preceding softmax: ``p - 1`` at the label, ``p`` elsewhere."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(probabilities, labels)
        at_label = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)
        return -torch.log(at_label.clamp_min(_LEAST.get(probabilities.dtype, _LEAST_OTHERWISE)))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = upstream
        probabilities, labels = ctx.saved_tensors
        slope = probabilities.scatter_add(1, labels.unsqueeze(1), -torch.ones_like(probabilities[:, :1]))
        return slope * gradient.unsqueeze(1), None, None


def _apply(function: Any, *inputs: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = function.apply(*inputs)
    return losses


@operator("Nll", domain=GRAPHCORE)
def _nllloss(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    probabilities, labels = inputs
    classes = probabilities.shape[-1]
    rows, flat = probabilities.reshape(-1, classes), labels.reshape(-1).to(torch.int64)
    if rows.shape[0] != flat.shape[0]:
        raise popart_exception(
            f"nllloss {node.name!r} takes a label for each row of probabilities: received {rows.shape[0]} rows "
            f"({list(probabilities.shape)}) and {flat.shape[0]} labels ({list(labels.shape)})"
        )
    ignored = node.attributes.get("ignoreIndex")
    keep = torch.ones_like(flat, dtype=torch.bool) if ignored is None else flat != ignored
    flat = torch.where(keep, flat, torch.zeros_like(flat))
    if not flat.is_meta and flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < classes:
        wrong = int(flat.max()) if int(flat.max()) >= classes else int(flat.min())
        raise popart_exception(f"nllloss {node.name!r} received the label {wrong}; there are {classes} classes, from 0")
    if node.attributes.get("inputIsLogProbability"):
        losses = -rows.gather(1, flat.unsqueeze(1)).squeeze(1)
    elif node.logits in run.values and node.axis % probabilities.dim() == probabilities.dim() - 1:
        logits = run.values[node.logits].reshape(-1, classes)
        losses = _apply(_SoftmaxCrossEntropy, logits, rows.detach(), flat)
    else:
        losses = _apply(_NegativeLogLikelihood, rows, flat)
    losses = losses * keep
    total = _reduced(node.attributes, losses, keep.sum().clamp_min(1))
    return total.reshape(labels.shape) if node.attributes.get("reduction") == "NoReduction" else total


@operator("ReplicatedAllReduce", domain=GRAPHCORE)
def _replicated_allreduce(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    """Return the tensor of a single replica; refuse several, which run in turn and cannot wait for each other."""
    if run.replicas > 1:
        raise popart_exception(
            f"replicatedallreduce {node.name!r} needs replicas side by side; the {run.replicas} of this job are not"
        )
    return inputs[0].view_as(inputs[0])


simple({"L1": lambda a, x: _reduced(a, x.abs() * a["lambda"]), "IdentityLoss": _reduced}, GRAPHCORE)
