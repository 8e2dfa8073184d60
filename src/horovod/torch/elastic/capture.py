"""Copies of modules' buffers before a step, such as batch norm averages, to restore them after a failed step."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from horovod.torch.elastic.handlers import drop_gradients
from horovod.transports.kernels_torch import as_bytes

__all__ = ["Capture"]

#: Buffers of at most this many elements are copied before every step: torch's version counter misses some writes,
#: such as batch norm's averages.
_ALWAYS = 1 << 16
#: Trained parameters of which a few elements are copied: version counters miss optimizers with ``fused=True`` and what
#: is written to ``.data``, and torch.compile removes hooks of optimizers. The smallest parameters, biases and scales,
#: have dense gradients. The optimizer's state of them changes even if the learning rate is 0.
_WATCHED = 8


#: Steps that optimizers of this process have completed: one that changes a few rows of an embedding is in no sample.
_steps = 0


@functools.cache
def _count_steps() -> None:
    def count(*_: object) -> None:
        global _steps
        _steps += 1

    register_optimizer_step_post_hook(count)


@dataclass
class _Buffer:
    """A buffer and its values before the step."""

    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor
    values: torch.Tensor
    version: int  # torch's count of writes to the buffer when the copy was made


class Capture:
    """Copies of modules' buffers, and a check whether their parameters changed since ``take``."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] | None = None
        self._parameters: list[torch.nn.Parameter] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        #: Parameters of the optimizers, else of the models, by size.
        self._candidates: list[torch.Tensor] = []
        self._watched: list[torch.Tensor] = []
        self._samples: list[torch.Tensor] = []
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        self._version = self._steps = 0
        _count_steps()

    def forget(self) -> None:
        """Search for modules again at the next ``take``."""
        self._modules = None

    def take(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Copy the buffers that have changed since the last call; copy few elements of few parameters.

        Models and optimizers are the same as in the last call, unless ``forget`` was called.
        """
        if self._modules is None:
            every = [module for model in models for module in model.modules()]
            self._modules = [module for module in every if module._buffers]
            self._parameters = [p for module in every for p in module._parameters.values() if p is not None]
            self._buffers = {}
            self._optimizers = list(optimizers)
            of_groups = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
            known = [p for p in of_groups or self._parameters if not isinstance(p, torch.nn.UninitializedParameter)]
            self._candidates = sorted(known, key=lambda p: p.numel())
        self._watched = [p for p in self._candidates if p.requires_grad][:_WATCHED]
        with torch.no_grad():
            for module in self._modules:
                for name, tensor in module._buffers.items():
                    if tensor is not None:
                        self._take_one(module, name, tensor)
            self._samples = self._sample()
        self._version, self._steps = self._versions(), _steps

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
            samples = self._sample()
            for buffer in self._buffers.values():
                buffer.owner._buffers[buffer.name] = buffer.tensor
                if _may_differ(buffer):
                    buffer.tensor.copy_(buffer.values)
                    buffer.version = _version(buffer.tensor)
        drop_gradients(self._parameters)
        is_same = len(samples) == len(self._samples) and all(map(_are_same, samples, self._samples))
        return is_same and (self._version, self._steps) == (self._versions(), _steps)

    def _sample(self) -> list[torch.Tensor]:
        """Return a few elements of the watched parameters, and of the optimizers' states of them."""
        states = [each.state[p] for each in self._optimizers for p in self._watched if p in each.state]
        values = [*self._watched, *(value for state in states for value in state.values())]
        return [_few(value) for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided]

    def _versions(self) -> int:
        return sum(map(_version, self._parameters))


def _may_differ(buffer: _Buffer) -> bool:
    return buffer.version != _version(buffer.tensor) or buffer.tensor.numel() <= _ALWAYS


def _version(tensor: torch.Tensor) -> int:
    # Inference-mode tensors have no write count, and cannot be written outside inference mode.
    return 0 if tensor.is_inference() else tensor._version


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of some elements, of many rows: an embedding changes only in those that a batch has."""
    step = [slice(None, None, size // most + 1) for size, most in zip(tensor.shape, (64, 4, 1, 1, 1, 1), strict=False)]
    return tensor.detach()[tuple(step)].clone()


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(as_bytes(one), as_bytes(other))
