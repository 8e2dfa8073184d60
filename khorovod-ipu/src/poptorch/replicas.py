"""Replicas of one model in one process: all share the weights, which exist once; each replica has its own buffers,
such as running statistics, and its own random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["Replicas", "combined", "mapped", "micro_batch"]

_Key = tuple[torch.nn.Module, str]
_PLAIN = (bool, float, int, str, type(None))


class Replicas:
    """The replicas of this process.

    Args:
        model: the model; between calls it has the buffers of the first replica.
        count: number of replicas.
        seed: seed of the job; each replica derives its own seed.
        first: global index of the first replica.
    """

    def __init__(self, model: torch.nn.Module, count: int, seed: int, first: int) -> None:
        self._model = model
        self.count = count
        self._buffers: list[dict[_Key, torch.Tensor | None]] = []
        self._versions: dict[_Key, Any] = {}
        self._random = [torch.Generator().manual_seed(seed + first + r).get_state() for r in range(count)]

    def _own_buffers(self) -> dict[_Key, torch.Tensor | None]:
        return {(m, name): buffer for m in self._model.modules() for name, buffer in m._buffers.items()}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context for a call; after it the model has the first replica's buffers. If they were changed or
        replaced since the last call, all replicas begin with them: an inference model follows the training."""
        first = self._own_buffers()
        if not self._buffers or _versions(first) != self._versions:
            self._buffers = [first] + [{k: _copy(v) for k, v in first.items()} for _ in range(self.count - 1)]
        try:
            yield
        finally:
            self._put(self._buffers[0])
            self._versions = _versions(self._buffers[0])

    @contextlib.contextmanager
    def replica(self, number: int) -> Iterator[None]:
        """Return a context in which the model has the buffers and random numbers of a replica.

        Args:
            number: index of the replica in this process.
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
        """Reset the buffers of all replicas to the model's present buffers."""
        self._buffers = []


def _versions(buffers: dict[_Key, torch.Tensor | None]) -> dict[_Key, Any]:
    return {key: b if b is None else (id(b), b.is_inference() or b._version) for key, b in buffers.items()}


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.clone()


def mapped(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply a function to the tensors at equal positions of equal structures.

    Args:
        function: function of one tensor of each structure.
        first: a tensor, or tensors in tuples, lists and dictionaries; other values are kept.
        others: structures like the first.

    Raises:
        TypeError: a value is not a tensor, and has parts, or is not the same in all structures.
    """
    if isinstance(first, torch.Tensor):
        return function(first, *others)
    if isinstance(first, dict):
        return type(first)({key: mapped(function, *(each[key] for each in (first, *others))) for key in first})
    if isinstance(first, (tuple, list)):
        items = [mapped(function, *each) for each in zip(first, *others, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, (Mapping, np.ndarray)) or any(type(v) not in _PLAIN or v != first for v in others):
        raise TypeError(
            f"models take and return tensors, in tuples, lists and dictionaries; other values must be the same for all "
            f"micro-batches. Received: {type(first).__name__}"
        )
    return first


def micro_batch(value: Any, number: int, count: int, factors: str) -> Any:
    """Return one part of the arguments of a call.

    Args:
        value: tensors in any structure; other values are the same for all parts.
        number: index of the part.
        count: number of parts.
        factors: explains the number of parts in the error message.

    Raises:
        ValueError: a tensor cannot be divided.
    """

    def part(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.shape[0] if tensor.dim() else 0
        if count > 1 and (not size or size % count):
            raise ValueError(
                f"an input of shape {tuple(tensor.shape)} cannot be divided into {count} micro-batches ({factors}): "
                f"its first dimension must be a multiple of {count}. Use poptorch.DataLoader with drop_last=True"
            )
        return tensor if count == 1 else tensor.narrow(0, number * (size // count), size // count)

    return mapped(part, value)


def combined(pieces: list[Any]) -> Any:
    """Join the results of micro-batches along the first dimension; numbers become a vector.

    Args:
        pieces: results with equal structures.
    """
    if len(pieces) == 1:
        return pieces[0]
    return mapped(lambda *tensors: torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors), *pieces)
