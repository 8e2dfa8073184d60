"""Layers that wait, in forward, for their own weights: what the others send arrives while earlier layers compute."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["watch_model"]

#: These call the forward of what they hold.
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def watch_model(
    model: torch.nn.Module, owner: Any, need: Callable[[Any, Iterator[torch.Tensor] | None], None]
) -> list[Any]:
    """Have ``need(owner, parameters)`` called before a module uses its parameters, and with None for a checkpoint.

    Args:
        model: whose modules.
        owner: is not kept alive.
        need: gets the parameters; None for all there are.

    Returns:
        The hooks, each with a ``remove()``.
    """
    me = weakref.ref(owner)

    def before_forward(module: torch.nn.Module, _: Any) -> None:
        if (found := me()) is not None:
            need(found, _used_by(module))

    def before_state_dict(*_: Any) -> None:
        if (found := me()) is not None:
            need(found, None)

    hooks: list[Any] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(before_forward))
        hooks.append(module.register_state_dict_pre_hook(before_state_dict))  # type: ignore[no-untyped-call]
    return hooks


def _used_by(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return what a module's forward may read itself: of torch's own also what the modules inside hold.

    ``MultiheadAttention`` and the layers of transformers read the weights of theirs without calling them.
    """
    inside = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
    return module.parameters(recurse=inside)
