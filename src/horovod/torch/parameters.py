"""The parameters of a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.misuse import wrong_argument
from horovod.bindings.process_sets import ProcessSet
from horovod.core.requests import ReduceOp

__all__ = ["Named", "WrappedOptimizer", "check_optimizer", "parameters_of", "trained"]

Named = list[tuple[str, torch.Tensor]]


class WrappedOptimizer:
    """Base of the methods of a distributed optimizer."""

    # Default for a copy (copy.deepcopy, pickle): it is a plain optimizer again.
    _settings: ReduceSettings | None = None

    param_groups: list[dict[str, Any]]
    backward_passes_per_step: int
    op: ReduceOp
    process_set: ProcessSet
    _groups: list[list[torch.Tensor]] | None
    _parameter_names: dict[torch.Tensor, str]

    def _set_up(
        self, settings: ReduceSettings, passes: int, named: Named, groups: list[list[torch.Tensor]] | None
    ) -> None:
        self._settings, self.op, self.process_set = settings, settings.op, settings.process_set
        self.backward_passes_per_step = passes
        self._groups = groups
        self._parameter_names = {parameter: name for name, parameter in named}


def check_optimizer(optimizer: Any) -> None:
    """Raise RequestError unless ``optimizer`` is a torch optimizer."""
    if not hasattr(optimizer, "param_groups"):
        raise wrong_argument(
            "optimizer must be a torch optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1). "
            f"Received: {type(optimizer).__name__}"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained(param_groups: list[dict[str, Any]], names: dict[torch.Tensor, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and parameter of all that require a gradient, in group order; add missing names to ``names``."""
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.requires_grad:
                name = names.get(parameter)
                if name is None:
                    name = names[parameter] = f"allreduce.noname.{number}.{index}"
                yield name, parameter
