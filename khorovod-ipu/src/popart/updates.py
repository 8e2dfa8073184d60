"""In-place updates of weights: the arithmetic of PopART's optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from popart.enums import AdamMode, AdaptiveMode, WeightDecayMode
from popart.optimizers import SGD, Adam, Adaptive, Optimizer
from popart.tensors import Array, TensorInfo

__all__ = ["STATE", "Updates", "clip_factors", "first_state"]

#: Beginning of the ids of the optimizer's state, which the session keeps as it keeps weights.
STATE = "OptimizerState___"


def _state_ids(optimizer: Optimizer, weight: str) -> dict[str, str]:
    """Return the ids of the state for one weight. They name the algorithm: another one must not go on from it."""
    algorithm, kinds = "SGD", ["velocity"] if isinstance(optimizer, SGD) and optimizer.has_momentum() else []
    if isinstance(optimizer, Adam | Adaptive):
        kinds = ["first", "second", "steps"] if isinstance(optimizer, Adam) else ["squares", "others", "momentum"]
        algorithm = optimizer.mode.name
    return {kind: f"{STATE}{algorithm}.{kind}___{weight}" for kind in kinds}


def first_state(optimizer: Optimizer, weights: Mapping[str, TensorInfo]) -> dict[str, Array]:
    """Return the state with which an optimizer begins, by id; of weights in half precision it is float32."""
    made = {}
    for weight, own in weights.items():
        for kind, name in _state_ids(optimizer, weight).items():
            dtype = np.float32 if kind == "steps" else np.promote_types(own.numpy_dtype(), np.float32)
            first = kind == "squares" and getattr(optimizer, "rmsprop_tf_variant", False)
            made[name] = np.full([] if kind == "steps" else own.shape(), first, dtype)
    return made


class Updates:
    """The optimizer on the device.

    Args:
        optimizer: optimizer with the hyperparameters; may be replaced.
        tensors: tensors of the device by id; the optimizer's state is among them.

    Attributes:
        optimizer: the present optimizer.
    """

    def __init__(self, optimizer: Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
        self.optimizer, self._tensors = optimizer, tensors

    def apply(self, name: str, weight: torch.Tensor, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Update one weight.

        Args:
            name: id of the weight.
            weight: the tensor to update.
            gradient: gradient times the loss scaling.
            scale: factor for the gradient.
        """
        optimizer = self.optimizer
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        gradient = gradient * (scale / optimizer.getLossScalingVal())
        state = {kind: self._tensors[own] for kind, own in _state_ids(optimizer, name).items()}
        if isinstance(optimizer, Adam):
            _adam(optimizer, name, weight, gradient, state)
        elif isinstance(optimizer, Adaptive):
            _adaptive(optimizer, name, weight, gradient, state)
        elif isinstance(optimizer, SGD):
            _sgd(optimizer, name, weight, gradient, state)


def _sgd(optimizer: SGD, name: str, w: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    rate, decay = optimizer.hyperparameter("learningRate", name), optimizer.hyperparameter("weightDecay", name)
    momentum, dampening = optimizer.hyperparameter("momentum", name), optimizer.hyperparameter("dampening", name)
    step = (1 - dampening) * (g + decay * w)
    if optimizer.has_momentum():
        step = state["velocity"].mul_(momentum).add_(step)
    w.sub_(rate * step)


def _adam(optimizer: Adam, name: str, w: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    rate, decay, beta1, beta2, eps = (
        optimizer.hyperparameter(key, name) for key in ("learningRate", "weightDecay", "beta1", "beta2", "eps")
    )
    if optimizer.weight_decay_mode is WeightDecayMode.L2Regularization:
        g = g + decay * w
    steps = state["steps"].add_(1)
    first = state["first"].mul_(beta1).add_((1 - beta1) * g)
    second = state["second"]
    unbiased = optimizer.mode in (AdamMode.Adam, AdamMode.Lamb)
    correction1 = 1 - beta1 ** steps.item() if unbiased or optimizer.mode is AdamMode.AdaMax else 1.0
    if optimizer.mode is AdamMode.AdaMax:
        second.copy_(torch.maximum(second * beta2, g.abs()))
        step = first / correction1 / (second + eps)
    else:
        second.mul_(beta2).add_((1 - beta2) * g * g)
        correction2 = 1 - beta2 ** steps.item() if unbiased else 1.0
        step = (first / correction1) / ((second / correction2).sqrt() + eps)
    if optimizer.weight_decay_mode is WeightDecayMode.Decay:
        step = step + decay * w
    if optimizer.mode in (AdamMode.Lamb, AdamMode.LambNoBias):
        length, most = w.norm(), optimizer.hyperparameter("maxWeightNorm", name)
        size = step.norm()
        step = step * (torch.clamp(length, max=most) / size if length > 0 and size > 0 else 1.0)
    w.sub_(rate * step)


def _adaptive(optimizer: Adaptive, name: str, w: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    rate, decay, alpha, momentum, eps = (
        optimizer.hyperparameter(key, name) for key in ("learningRate", "weightDecay", "alpha", "momentum", "eps")
    )
    if optimizer.weight_decay_mode is WeightDecayMode.L2Regularization:
        g = g + decay * w
    mode, like_tensorflow = optimizer.mode, optimizer.rmsprop_tf_variant
    squares, others = state["squares"], state["others"]
    if mode is AdaptiveMode.AdaGrad:
        squares.add_(g * g)
    else:
        squares.mul_(alpha).add_((1 - alpha) * g * g)
    if mode is AdaptiveMode.AdaDelta:
        step = g * (others + eps).sqrt() / (squares + eps).sqrt()
        others.mul_(alpha).add_((1 - alpha) * step * step)
    else:
        spread = squares
        if mode is AdaptiveMode.CenteredRMSProp:
            mean = others.mul_(alpha).add_((1 - alpha) * g)
            spread = squares - mean * mean
        step = g / ((spread + eps).sqrt() if like_tensorflow else spread.sqrt() + eps)
    if optimizer.weight_decay_mode is WeightDecayMode.Decay:
        step = step + decay * w
    if like_tensorflow:  # a later change of the rate does not scale the momentum
        step, rate = rate * step, 1.0
    if momentum:
        step = state["momentum"].mul_(momentum).add_(step)
    w.sub_(rate * step)


def clip_factors(optimizer: Optimizer, gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return a factor for each gradient that keeps norms within their limits; 1 if no change is needed.

    Args:
        optimizer: optimizer with the limits.
        gradients: all gradients, times the loss scaling.
    """
    factors = dict.fromkeys(gradients, 1.0)
    for settings in optimizer.clip_norm_settings:
        names = [name for name in gradients if settings.weightIds is None or name in settings.weightIds]
        squares = sum(float(gradients[name].double().square().sum()) for name in names)
        norm = squares**0.5 / optimizer.getLossScalingVal()
        for name in names:
            factors[name] *= min(1.0, settings.maxNorm / norm) if norm > 0 else 1.0
    return factors
