"""Torch's optimizers with PopTorch's additional arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "RMSprop", "VariableAttributes"]


class VariableAttributes:
    """The attributes that may change after compiling: here ``setOptimizer`` may change all.

    Args:
        variable_attributes: variable attributes of the optimizer.
        allowed_attributes: all existing attributes.
    """

    def __init__(self, variable_attributes: Any = None, allowed_attributes: Any = None) -> None:
        pass

    def markAsConstant(self, attr: str) -> None:
        """Do nothing; accepted for compatibility."""

    markAsVariable = markAsConstant


_HARDWARE = (
    "accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type", "use_combined_accum",
    "velocity_accum_type", "velocity_scaling",
)  # fmt: skip


class _WithLossScaling:
    """Mixin with the additional arguments of PopTorch's optimizers.

    Attributes:
        loss_scaling: factor of the loss before backward; the gradients are divided by it afterwards.
        variable_attrs: accepted, without effect.
    """

    loss_scaling: float
    variable_attrs: VariableAttributes

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        scaling = kwargs.pop("loss_scaling", None)
        for name in _HARDWARE:
            kwargs.pop(name, None)
        if "max_grad_norm" in kwargs:
            self.max_grad_norm = kwargs.pop("max_grad_norm")
        super().__init__(params, *args, **kwargs)  # type: ignore[call-arg]
        self.loss_scaling = 1.0 if scaling is None else float(scaling)
        if not self.loss_scaling > 0:
            raise ValueError(f"loss_scaling must be above 0; received {scaling!r}")
        self.variable_attrs = VariableAttributes()


class SGD(_WithLossScaling, torch.optim.SGD):
    """Stochastic gradient descent; see ``torch.optim.SGD`` and ``loss_scaling``."""

    def __init__(self, params: Any, lr: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, lr, *args, **kwargs)


class Adam(_WithLossScaling, torch.optim.Adam):
    """Adam; see ``torch.optim.Adam`` and ``loss_scaling``."""


class AdamW(_WithLossScaling, torch.optim.AdamW):
    """Adam with decoupled weight decay; see ``torch.optim.AdamW`` and ``loss_scaling``."""


def _stepped(optimizer: torch.optim.Optimizer, move: Callable[..., None], closure: Any) -> Any:
    """Update every parameter that has a gradient; return the closure's result."""
    loss = None if closure is None else torch.enable_grad()(closure)()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    move(parameter, parameter.grad, group)
    return loss


class RMSprop(_WithLossScaling, torch.optim.RMSprop):
    """RMSprop; see ``torch.optim.RMSprop`` and ``loss_scaling``.

    Args:
        params: parameters to train.
        args: positional arguments of ``torch.optim.RMSprop``.
        use_tf_variant: compute as TensorFlow does: ``eps`` is added under the root, the mean of the squares begins with
            1, and the momentum holds steps that include the learning rate.
        kwargs: keyword arguments of ``torch.optim.RMSprop``.
    """

    def __init__(self, params: Any, *args: Any, use_tf_variant: bool = False, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self._like_tensorflow = use_tf_variant

    def step(self, closure: Any = None) -> Any:
        """Make a step with the gradients of all parameters.

        Args:
            closure: computes the loss again.
        """
        return _stepped(self, self._move, closure) if self._like_tensorflow else super().step(closure)

    def _move(self, w: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, alpha = self.state[w], group["alpha"]
        if not state:
            state.update(square_avg=torch.ones_like(w), grad_avg=torch.zeros_like(w), buffer=torch.zeros_like(w))
        gradient = gradient.add(w, alpha=group["weight_decay"])
        spread = state["square_avg"].mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        if group["centered"]:
            mean = state["grad_avg"].mul_(alpha).add_(gradient, alpha=1 - alpha)
            spread = spread - mean * mean
        step = group["lr"] * gradient / (spread + group["eps"]).sqrt()
        w.sub_(state["buffer"].mul_(group["momentum"]).add_(step))


class _Lamb(torch.optim.Optimizer):
    """You et al., Large Batch Optimization for Deep Learning, https://arxiv.org/abs/1904.00962."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        bias_correction: bool = True,
        max_weight_norm: float | None = None,
    ) -> None:
        values = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "max_weight_norm": max_weight_norm,
        }  # fmt: skip
        super().__init__(params, values)

    def step(self, closure: Any = None) -> Any:
        return _stepped(self, self._move, closure)

    def _move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["bias_correction"]:
            mean, square = mean / (1 - beta1 ** state["step"]), square / (1 - beta2 ** state["step"])
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        weight_norm, update_norm = parameter.norm(), update.norm()
        if group["max_weight_norm"] is not None:
            weight_norm = weight_norm.clamp(max=group["max_weight_norm"])
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        parameter.sub_(group["lr"] * ratio * update)


class LAMB(_WithLossScaling, _Lamb):
    """LAMB: Adam with steps scaled by the norm of each layer's weights; and ``loss_scaling``."""
