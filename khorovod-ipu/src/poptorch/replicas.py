"""Replicas of one model in one process: the weights are the same for all, so that they exist once; buffers, such as
running statistics, and random numbers are each replica's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Replicas", "combined", "micro_batch"]

_Key = tuple[torch.nn.Module, str]


class Replicas:
    """The replicas of this process.

    Args:
        model: the model; between calls it has the buffers of the first replica.
        count: how many replicas.
        seed: of the job; each replica's random numbers begin with its own.
        first: global number of the first of them.
    """

    def __init__(self, model: torch.nn.Module, count: int, seed: int, first: int) -> None:
        self._model = model
        self.count = count
        self._buffers: list[dict[_Key, torch.Tensor | None]] = []
        self._random = [torch.Generator().manual_seed(seed + first + r).get_state() for r in range(count)]

    def _own_buffers(self) -> dict[_Key, torch.Tensor | None]:
        return {(m, name): buffer for m in self._model.modules() for name, buffer in m._buffers.items()}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around a call: afterwards the model has the first replica's buffers again, which may have been changed or
        replaced since the last call."""
        first = self._own_buffers()
        if not self._buffers:
            self._buffers = [first] + [{k: _copy(v) for k, v in first.items()} for _ in range(self.count - 1)]
        self._buffers[0] = first
        try:
            yield
        finally:
            self._put(self._buffers[0])

    @contextlib.contextmanager
    def replica(self, number: int) -> Iterator[None]:
        """Inside of the block the model is that replica.

        Args:
            number: of the replica in this process.
        """
        outer = torch.get_rng_state()
        torch.set_rng_state(self._random[number])
        if self.count > 1:
            self._put(self._buffers[number])
        try:
            yield
        finally:
            self._random[number] = torch.get_rng_state()
            torch.set_rng_state(outer)
            self._buffers[number] = self._own_buffers()

    def _put(self, buffers: dict[_Key, torch.Tensor | None]) -> None:
        for (module, name), buffer in buffers.items():
            module._buffers[name] = buffer

    def forget_buffers(self) -> None:
        """All replicas begin again with the buffers that the model has now."""
        self._buffers = []


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.clone()


def micro_batch(value: Any, number: int, count: int, factors: str) -> Any:
    """One part of what a call was given.

    Args:
        value: a tensor, or tensors in tuples, lists and dictionaries; anything else is the same for all parts.
        number: of the part.
        count: how many parts there are.
        factors: what the number of parts comes from, for the message.

    Raises:
        ValueError: a tensor cannot be divided.
    """
    if isinstance(value, torch.Tensor):
        if count == 1:
            return value
        size = value.shape[0] if value.dim() else 0
        if not size or size % count:
            raise ValueError(
                f"an input of shape {tuple(value.shape)} cannot be divided into {count} micro-batches ({factors}): its "
                f"first dimension must be a multiple of {count}, as poptorch.DataLoader makes it"
            )
        each = size // count
        return value[number * each : (number + 1) * each]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(micro_batch(item, number, count, factors) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(micro_batch(item, number, count, factors) for item in value)
    if isinstance(value, dict):
        return {key: micro_batch(item, number, count, factors) for key, item in value.items()}
    return value


def combined(pieces: list[Any]) -> Any:
    """The results of several micro-batches as one: along the first dimension, numbers as a vector.

    Args:
        pieces: all of the same structure.
    """
    first = pieces[0]
    if isinstance(first, torch.Tensor):
        if len(pieces) == 1:
            return first
        return torch.cat(pieces) if first.dim() else torch.stack(pieces)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(combined(list(items)) for items in zip(*pieces, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(combined(list(items)) for items in zip(*pieces, strict=True))
    if isinstance(first, dict):
        return type(first)({key: combined([piece[key] for piece in pieces]) for key in first})
    return first
