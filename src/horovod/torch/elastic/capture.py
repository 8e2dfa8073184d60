"""Copies of modules' buffers before a step, such as batch norm averages, to restore them after a failed step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from horovod.torch.elastic.handlers import drop_gradients

__all__ = ["Capture"]

#: Buffers of at most this many elements are copied before every step: torch's version counter misses some writes,
#: such as batch norm's averages.
_ALWAYS = 1 << 16


@dataclass
class _Buffer:
    """A buffer and its values before the step.

    Attributes:
        owner: module of the buffer.
        name: name of the buffer in the module.
        tensor: the buffer.
        values: copy of the buffer.
        version: torch's count of writes to the buffer when the copy was made.
    """

    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor
    values: torch.Tensor
    version: int


class Capture:
    """Copies of modules' buffers, and a check whether their parameters changed since ``take``."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] | None = None
        self._parameters: list[torch.nn.Parameter] = []
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        self._version = 0

    def forget(self) -> None:
        """Search for modules again at the next ``take``."""
        self._modules = None

    def take(self, models: Iterable[torch.nn.Module]) -> None:
        """Copy the buffers that have changed since the last call; do not copy parameters.

        Args:
            models: the same models as in the last call, unless ``forget`` was called.
        """
        if self._modules is None:
            every = [module for model in models for module in model.modules()]
            self._modules = [module for module in every if module._buffers]
            self._parameters = [p for module in every for p in module._parameters.values() if p is not None]
            self._buffers = {}
        with torch.no_grad():
            for module in self._modules:
                for name, tensor in module._buffers.items():
                    if tensor is not None:
                        self._take_one(module, name, tensor)
        self._version = self._versions()

    def _take_one(self, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        known = self._buffers.get((id(module), name))
        if known is None or known.tensor is not tensor:
            self._buffers[id(module), name] = _Buffer(module, name, tensor, tensor.clone(), _version(tensor))
        elif _may_differ(known):
            known.values.copy_(tensor)
            known.version = _version(tensor)

    def undo(self) -> bool:
        """Restore the buffers and drop gradients; return whether the parameters are unchanged since ``take``."""
        with torch.no_grad():
            for buffer in self._buffers.values():
                buffer.owner._buffers[buffer.name] = buffer.tensor
                if _may_differ(buffer):
                    buffer.tensor.copy_(buffer.values)
                    buffer.version = _version(buffer.tensor)
        drop_gradients(self._parameters)
        return self._version == self._versions()

    def _versions(self) -> int:
        return sum(map(_version, self._parameters))


def _may_differ(buffer: _Buffer) -> bool:
    return buffer.version != _version(buffer.tensor) or buffer.tensor.numel() <= _ALWAYS


def _version(tensor: torch.Tensor) -> int:
    # Inference-mode tensors have no write count, and cannot be written outside inference mode.
    return 0 if tensor.is_inference() else tensor._version
