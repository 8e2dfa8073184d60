"""All code that depends on torch's internals.

keep_out_of_graphs  adds a rule to torch.compile; else it breaks its graphs at the collectives, with a warning for each
forget_step         lets a GradScaler repeat a failed step; else the scaler refuses that
is_transformed      detects tensors inside torch.func; else the engine fails at their values, or loses tangents
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["forget_step", "is_transformed", "keep_out_of_graphs"]

_RULES = "torch._dynamo.trace_rules"


class _Finder(importlib.abc.MetaPathFinder):
    """Adds our rule to ``torch._dynamo.trace_rules`` as soon as torch loads that module."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return a spec that adds the rule; None for any other module."""
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if isinstance(spec, ModuleSpec) and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                _tell(module)

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


_finder = _Finder()
_is_told = False


def keep_out_of_graphs() -> None:
    """Make torch.compile call horovod's functions instead of tracing into them.

    Without this, torch breaks the graph at each function, with a warning. If torch's compiler is not loaded yet, the
    rule is added when it is: loading it takes longer than horovod's whole start.
    """
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _tell(rules)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _tell(rules: ModuleType) -> None:
    # ``add`` is not a public name: a torch version without it only shows the warnings.
    global _is_told
    add = getattr(rules, "add", None)
    if add is not None and not _is_told:
        _is_told = True
        add("horovod")


_is_wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda tensor: False)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether torch.func (vmap, grad, jvp) has wrapped a tensor, or it has a tangent of forward mode."""
    if _is_wrapped(tensor):
        return True
    if getattr(forward_ad, "_current_level", -1) < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def forget_step(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler unscale and step again, which it refuses to do twice without ``update()``."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None:
        states.clear()
