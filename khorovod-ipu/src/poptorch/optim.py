"""Torch's optimizers with PopTorch's additional arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from poptorch.hints import Hint

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "RMSprop", "VariableAttributes", "in_float32"]


@contextlib.contextmanager
def in_float32(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Return a context in which parameters in half precision, their gradients and the optimizer's state are float32,
    where squares of small gradients do not become 0; the parameters then take the new values."""
    halves = [(p, p.data, p.grad) for p in parameters if torch.promote_types(p.dtype, torch.float32) != p.dtype]
    for p, data, gradient in halves:
        p.grad, p.data = None, data.float()
        p.grad = None if gradient is None else gradient.float()
        state = optimizer.state.get(p, {})
        state.update({k: v.float() for k, v in state.items() if isinstance(v, torch.Tensor) and v.dtype == data.dtype})
    try:
        yield
    finally:
        for p, data, gradient in halves:
            data.copy_(p.data)
            p.grad = None
            p.data, p.grad = data, gradient


class VariableAttributes(Hint):
    """The attributes that may change after compiling: here ``setOptimizer`` may change all."""

    markAsConstant = markAsVariable = Hint.accept


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
        self.max_grad_norm = kwargs.pop("max_grad_norm", None)
        super().__init__(params, *args, **kwargs)  # type: ignore[call-arg]
        self.loss_scaling = 1.0 if scaling is None else float(scaling)
        if not self.loss_scaling > 0:
            raise ValueError(f"loss_scaling must be above 0; received {scaling!r}")
        self.variable_attrs = VariableAttributes()

    def load_state_dict(self: Any, state_dict: Any) -> None:
        """Load a result of ``state_dict()``; the state of weights in half precision stays float32."""
        with in_float32(self, [parameter for group in self.param_groups for parameter in group["params"]]):
            super().load_state_dict(state_dict)  # type: ignore[misc]


class SGD(_WithLossScaling, torch.optim.SGD):
    """Stochastic gradient descent; see ``torch.optim.SGD`` and ``loss_scaling``."""

    def __init__(self, params: Any, lr: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, lr, *args, **kwargs)


class Adam(_WithLossScaling, torch.optim.Adam):
    """Adam; see ``torch.optim.Adam`` and ``loss_scaling``."""


class _Formula:
    """Mixin: steps by ``_move``, or by torch's step with ``defaults["torch"]``, which deep copies keep."""

    def step(self: Any, closure: Any = None) -> Any:
        """Make a step with the gradients of all parameters.

        Args:
            closure: computes the loss again.
        """
        if self.defaults.get("torch"):
            return super().step(closure)  # type: ignore[misc]
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._move(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _adam_step(state: Any, w: torch.Tensor, gradient: torch.Tensor, group: Any, unbiased: bool) -> Any:
    """Return Adam's step for a learning rate of 1, with decoupled decay."""
    beta1, beta2 = group["betas"]
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
    state["step"] += 1
    mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if unbiased:
        mean, square = mean / (1 - beta1 ** int(state["step"])), square / (1 - beta2 ** int(state["step"]))
    return mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * w


class AdamW(_WithLossScaling, _Formula, torch.optim.AdamW):
    """Adam with decoupled weight decay; see ``torch.optim.AdamW`` and ``loss_scaling``.

    Args:
        params: parameters to train.
        args: positional arguments of ``torch.optim.AdamW``.
        bias_correction: whether the means, which begin with 0, are corrected for it.
        kwargs: keyword arguments of ``torch.optim.AdamW``.

    Raises:
        ValueError: ``amsgrad`` or ``maximize`` without bias correction.
    """

    def __init__(self, params: Any, *args: Any, bias_correction: bool = True, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self.defaults["torch"] = bias_correction
        if not bias_correction and (self.defaults["amsgrad"] or self.defaults["maximize"]):
            raise ValueError("AdamW: bias_correction=False cannot be combined with amsgrad or maximize")

    def _move(self, w: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        w.sub_(group["lr"] * _adam_step(state, w, gradient, group, False))


class RMSprop(_WithLossScaling, _Formula, torch.optim.RMSprop):
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
        self.defaults["torch"] = not use_tf_variant

    def _move(self, w: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        alpha = group["alpha"]
        if not state:
            state.update(square_avg=torch.ones_like(w), grad_avg=torch.zeros_like(w), buffer=torch.zeros_like(w))
            state["step"] = torch.ones(())  # torch expects one in a state that it loads
        gradient = -gradient if group["maximize"] else gradient
        gradient = gradient.add(w, alpha=group["weight_decay"])
        spread = state["square_avg"].mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        if group["centered"]:
            mean = state["grad_avg"].mul_(alpha).add_(gradient, alpha=1 - alpha)
            spread = spread - mean * mean
        step = group["lr"] * gradient / (spread + group["eps"]).sqrt()
        w.sub_(state["buffer"].mul_(group["momentum"]).add_(step))


class _Lamb(_Formula, torch.optim.Optimizer):
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

    def _move(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        update = _adam_step(state, parameter, gradient, group, group["bias_correction"])
        weight_norm, update_norm = parameter.norm(), update.norm()
        if group["max_weight_norm"] is not None:
            weight_norm = weight_norm.clamp(max=group["max_weight_norm"])
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        parameter.sub_(group["lr"] * ratio * update)


class LAMB(_WithLossScaling, _Lamb):
    """LAMB: Adam with steps scaled by the norm of each layer's weights; and ``loss_scaling``."""
