"""Check that an optimizer treats each element of a parameter independently, so that ranks can step parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from horovod.bindings.misuse import wrong_argument

__all__ = ["check_elementwise", "unhooked_step"]

_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise RequestError unless ``optimizer`` is a known elementwise one of torch, or its class declares it."""
    cls = type(optimizer)
    known = [getattr(torch.optim, name).step for name in _ELEMENTWISE if hasattr(torch.optim, name)]
    own: Any = cls.step
    if not getattr(cls, "elementwise", any(inspect.unwrap(own) is inspect.unwrap(step) for step in known)):
        raise wrong_argument(
            "host_optimizer needs an optimizer that treats every element of a parameter by itself: "
            f"{', '.join(_ELEMENTWISE)}, or a class of yours that says so with `elementwise = True`. "
            f"Received: {cls.__name__}"
        )
    for option in ("differentiable", "capturable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise wrong_argument(f"host_optimizer cannot be combined with {option}=True of {cls.__name__}")


def unhooked_step(cls: type) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer's class without torch's hook wrapper."""
    step: Any = cls.step  # type: ignore[attr-defined]
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found
