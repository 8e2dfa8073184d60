"""Handlers that save, restore and send models, optimizers and samplers, by type; users may add types."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from horovod.bindings.objects import broadcast_object
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from horovod.torch.host_optimizer import HostMethods
from horovod.torch.optimizer_state import tensors_of

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "get_handler_registry",
    "is_compared",
    "set_handler_registry",
]


class StateHandler:
    """Keeps one value of a state.

    Args:
        value: the value.

    Attributes:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the value."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the value of the last ``save``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send rank 0's value to all ranks. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the value."""
        self.value = value
        self.save()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are equal on all ranks."""
        yield from ()

    def numbers(self) -> Any:
        """Return other values that are equal on all ranks: numbers and strings, in dicts and lists."""
        return None

    def state(self) -> Any:
        """Return the value for a checkpoint, or None if it cannot be written."""
        return None

    def load(self, state: Any) -> None:
        """Load the result of ``state``."""


class ModelStateHandler(StateHandler):
    """Keeps a module.

    Args:
        model: the module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        """Copy the parameters and buffers, reusing the memory of the last copy."""
        with torch.no_grad():
            self._saved = {name: _copied(v, self._saved.get(name)) for name, v in self.value.state_dict().items()}

    def restore(self) -> None:
        """Restore the parameters and buffers of the last ``save``; drop gradients."""
        self.value.load_state_dict(self._saved)
        drop_gradients(self.value.parameters())

    def sync(self) -> None:
        whole = self.value.state_dict()
        # Modules make this anew in each state_dict(), as tensors or as other objects.
        extra = {name: whole.pop(name) for name in list(whole) if name.endswith("_extra_state")}
        broadcast_parameters({name: v for name, v in whole.items() if isinstance(v, torch.Tensor)}, root_rank=0)
        if extra:
            self.value.load_state_dict(broadcast_object(extra), strict=False)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters, but no buffers: batch norm averages differ between ranks."""
        yield from self.value.parameters()

    def state(self) -> Any:
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        self.value.load_state_dict(state)


class OptimizerStateHandler(StateHandler):
    """Keeps an optimizer.

    With ``host_optimizer`` each rank has a part of the state; ``save`` gathers the whole on every rank. Collective.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        self.keep(self.state())

    def keep(self, state: Any) -> None:
        """Copy a result of ``state``, as ``save`` does with the present one."""
        self._saved = copy.deepcopy(state)

    def restore(self) -> None:
        self.load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of the state."""
        yield from (tensor for _, tensor in tensors_of(self.value))

    def numbers(self) -> Any:
        """Return the options that are numbers, such as learning rates."""
        kinds = (bool, int, float, tuple)
        return [[(k, v) for k, v in sorted(g.items()) if isinstance(v, kinds)] for g in self.value.param_groups]

    def state(self) -> Any:
        in_parts = isinstance(self.value, HostMethods)
        return self.value._whole_state_dict() if in_parts else self.value.state_dict()

    def load(self, state: Any) -> None:
        if isinstance(self.value, HostMethods):
            self.value._forget_shards()
        groups = self.value.param_groups
        self.value.load_state_dict(state)
        # Keep the old group objects: other objects refer to them, such as LearningRateScale.
        for group, loaded in zip(groups, self.value.param_groups, strict=True):
            if group is not loaded:
                group.clear()
                group.update(loaded)
        self.value.param_groups = groups


class SamplerStateHandler(StateHandler):
    """Keeps a sampler.

    Args:
        sampler: the sampler.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self._saved: Mapping[str, Any] = {}
        self.save()

    def save(self) -> None:
        self._saved = dict(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def numbers(self) -> Any:
        """Return the position in the epoch."""
        return sorted(self.value.state_dict().items())

    def state(self) -> Any:
        """Return the number of samples that were processed."""
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        self.value.load_state_dict(state)


def is_compared(handler: StateHandler) -> bool:
    """Whether a handler says what is equal on all ranks, which those of Horovod's scripts cannot."""
    kind = type(handler)
    return kind.tensors is not StateHandler.tensors or kind.numbers is not StateHandler.numbers


Registry = Sequence[tuple[type, Any]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return pairs of a type and its handler; ``TorchState`` uses the first pair that fits a value."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs of a type and its handler.

    Args:
        registry: pairs; a handler is a subclass of ``StateHandler`` whose constructor takes a value of the type.
    """
    global _registry
    _registry = registry


def drop_gradients(parameters: Any) -> None:
    """Drop gradients, because a failed step may have reduced only some of them."""
    for parameter in parameters:
        parameter.grad = None


def _copied(value: Any, old: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype, old.device) == (
        value.shape, value.dtype, value.device,
    )  # fmt: skip
    return old.copy_(value) if fits and old.layout is value.layout is torch.strided else value.detach().clone()
