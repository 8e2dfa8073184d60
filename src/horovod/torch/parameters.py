"""Names and groups of an optimizer's parameters: what a user may pass, and what is made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from horovod.bindings.buckets import split_evenly
from horovod.bindings.misuse import wrong_argument
from horovod.phrases import few

__all__ = ["Named", "check_kinds", "check_passes", "find_duplicates", "group_parameters", "name_parameters", "trained"]

Named = list[tuple[str, torch.Tensor]]


def trained(param_groups: list[dict[str, Any]], names: dict[torch.Tensor, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and parameter of all that wants a gradient, in the order of the groups; adds missing names."""
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.requires_grad:
                name = names.get(parameter)
                if name is None:
                    name = names[parameter] = f"allreduce.noname.{number}.{index}"
                yield name, parameter


def find_duplicates(names: Iterable[str]) -> set[str]:
    """Return the names that occur more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def check_kinds(optimizer: Any, compression: Any) -> None:
    """Raise RequestError unless ``optimizer`` and ``compression`` are what these words mean."""
    if not hasattr(optimizer, "param_groups"):
        raise wrong_argument(
            "optimizer must be a torch optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1). "
            f"Received: {type(optimizer).__name__}"
        )
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise wrong_argument(
            "compression must have compress() and decompress(), such as hvd.Compression.fp16. "
            f"Received: {compression!r}"
        )


def check_passes(passes: int) -> None:
    """Raise RequestError unless ``backward_passes_per_step`` makes sense."""
    if passes <= 0:
        raise wrong_argument(f"backward_passes_per_step must be 1 or more. Received: {passes}")


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> Named:
    """Check and return the user's names; none when there are none.

    Raises:
        RequestError: entries are no pairs, names are doubled, or do not cover the optimizer.
    """
    named = list(named_parameters) if named_parameters is not None else []
    for entry in named:
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise wrong_argument(
                "named_parameters must be pairs (name, parameter), such as model.named_parameters(). "
                f"Received one that is {type(entry).__name__}"
            )
    if doubled := find_duplicates(name for name, _ in named):
        raise wrong_argument(
            f"names in named_parameters must differ. Received several times: {few(sorted(doubled))}. For several "
            "models put something before the names, such as (f'encoder.{name}', parameter)"
        )
    known = {id(parameter) for _, parameter in named}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named and (unnamed := [parameter for parameter in own if id(parameter) not in known]):
        raise wrong_argument(
            f"named_parameters must name all of the optimizer's {len(own)} parameters, or be left out. "
            f"Received no name for {len(unnamed)}, the first one of shape {list(unnamed[0].shape)}, but names for "
            f"{few([name for name, _ in named])}. Were they made from another model than the optimizer's?"
        )
    return named


def group_parameters(
    optimizer: torch.optim.Optimizer, groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]] | None:
    """Return the user's groups as lists of parameters, or ``None``.

    Raises:
        RequestError: ``groups`` is neither a number nor a list of lists of parameters that occur once.
    """
    if groups is None or (isinstance(groups, int) and groups == 0):
        return None
    if isinstance(groups, int) and groups > 0:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        return [[trained[index] for index in run] for run in split_evenly(len(trained), groups)]
    if not isinstance(groups, list) or not all(isinstance(group, list | tuple) for group in groups):
        raise wrong_argument(
            f"groups must be a number of groups, or a list of lists of parameters. Received: {groups!r}"
        )
    seen: set[int] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not isinstance(parameter, torch.Tensor):
            raise wrong_argument(f"groups must hold parameters. Received: {type(parameter).__name__}")
        if id(parameter) in seen:
            raise wrong_argument(f"a parameter of shape {list(parameter.shape)} is twice in groups; once is allowed")
        seen.add(id(parameter))
    return [list(group) for group in groups]
