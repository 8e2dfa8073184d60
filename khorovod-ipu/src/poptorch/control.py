"""Loops, conditions and parts of tensors; torch itself could compute them without these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from poptorch.hints import Hint

__all__ = ["MultiConv", "NameScope", "cond", "dynamic_slice", "dynamic_update", "for_loop"]


class NameScope(Hint):
    """A name for the operations inside."""


class MultiConv(Hint):
    """Lets convolutions inside run concurrently."""

    availableMemoryProportions = partialsTypes = enableConvDithering = planType = Hint.accept
    perConvReservedTiles = cycleBackOff = Hint.accept


def for_loop(count: int, body: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call a function repeatedly, each time with its previous results.

    Args:
        count: number of calls.
        body: takes as many tensors as it returns.
        inputs: inputs of the first call.

    Raises:
        ValueError: the function returned another number of tensors.
    """
    values = list(inputs)
    for _ in range(count):
        found = body(*values)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        if len(found) != len(values):
            raise ValueError(
                f"for_loop: the body took {len(values)} tensors and returned {len(found)}; the numbers must be equal"
            )
        values = found
    return values


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inputs: Sequence[torch.Tensor],
    else_body: Callable[..., Any],
    else_inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Call one of two functions.

    Args:
        condition: a single value.
        then_body: function to call if the condition is true.
        then_inputs: inputs of ``then_body``.
        else_body: function to call if the condition is false.
        else_inputs: inputs of ``else_body``.
    """
    found = then_body(*then_inputs) if bool(condition) else else_body(*else_inputs)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int = 1) -> torch.Tensor:
    """Return the part of a tensor that begins at a position held by another tensor.

    Args:
        tensor: the whole tensor.
        dim: the dimension.
        start: a single integer.
        size: length of the range; every ``step``-th element is taken.
        step: at least 1.
    """
    return tensor.narrow(dim, int(start), size)[(slice(None),) * (dim % tensor.dim()) + (slice(None, None, step),)]


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """Return a tensor with a part replaced, which begins at a position held by another tensor.

    Args:
        input: any tensor; it is not changed.
        src: the part.
        dim: the dimension.
        start: a single integer.
        size: length of the part.
    """
    return torch.slice_scatter(input, src, dim, int(start), int(start) + size)
