"""A state of models, optimizers, samplers and plain objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from horovod.bindings.elastic import generators
from horovod.bindings.elastic.state import ObjectState, has_state
from horovod.bindings.misuse import type_name, wrong_argument
from horovod.bindings.objects import broadcast_object
from horovod.torch.elastic.capture import Capture
from horovod.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    is_compared,
    set_handler_registry,
)
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.host_optimizer import HostMethods
from horovod.torch.runtime import comm
from horovod.torch.unsafe import forget_step
from horovod.transports.kernels_torch import as_bytes

# Horovod's scripts import the handlers from here.
__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

T = TypeVar("T")


def _read_cuda() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def _write_cuda(states: list[torch.Tensor]) -> None:
    if states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])


#: The random generators of torch.
GENERATORS = (
    generators.Generator(lambda: torch.get_rng_state().numpy(), lambda s: torch.set_rng_state(torch.from_numpy(s)),
                         torch.manual_seed),
    generators.Generator(_read_cuda, _write_cuda, torch.cuda.manual_seed_all),
)  # fmt: skip


class TorchState(ObjectState):
    """A state of PyTorch objects: each keyword becomes an attribute.

    Handlers keep modules, optimizers and samplers (``get_handler_registry``); ``ObjectState`` keeps all other values.
    Assigning another object to an attribute with a handler saves the new object.

    Args:
        model: a module, optional.
        optimizer: an optimizer, optional; plain or from ``DistributedOptimizer``.
        **kwargs: more modules, optimizers and samplers, and plain objects.

    Raises:
        ValueError: a keyword is the name of a method.
        RequestError: the model or the optimizer is another object, without ``state_dict`` and ``load_state_dict``.
    """

    _generators = (*generators.BUILT_IN, *GENERATORS)
    _reducers = dict.fromkeys((torch.Tensor, torch.nn.Parameter), lambda tensor: _bits(tensor))
    _handlers: Mapping[str, StateHandler]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._check_names(kwargs)
        kwargs.update(model=model, optimizer=optimizer)
        found = {name: handler for name, value in kwargs.items() if (handler := _handler_of(value)) is not None}
        for name, value in (("model", model), ("optimizer", optimizer)):
            if value is not None and name not in found and not has_state(value):
                raise wrong_argument(f"TorchState's {name} is not one of torch. Received: {type_name(value)}")
        for name, handler in found.items():
            handler.save()  # a user's handler may not save in its constructor
            object.__setattr__(self, name, handler.value)
        self._handlers, self._capture = found, Capture()
        plain = {name: value for name, value in kwargs.items() if name not in found}
        super().__init__(bcast_object=broadcast_object, get_rank=comm.rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
            self._capture.forget()
        object.__setattr__(self, name, value)

    def save(self) -> None:
        handlers = self._handlers.values()
        # Gather all shards before anything is overwritten: if a rank dies meanwhile, the last save must stay whole.
        in_parts = [h for h in handlers if isinstance(h, OptimizerStateHandler) and isinstance(h.value, HostMethods)]
        whole = {handler: handler.state() for handler in in_parts}
        for handler in handlers:
            if handler in whole:
                handler.keep(whole[handler])
            else:
                handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        if not self._all_equal:
            for handler in self._handlers.values():
                handler.sync()
        super().sync()
        for value in self._values():
            if isinstance(value, ElasticSampler):
                value.reset()

    def digest(self) -> str:
        """Return a hash of parameters, optimizer states and options, samplers and plain attributes.

        It is empty if a user's handler does not say what is equal on all ranks.
        """
        self._capture.forget()
        if not all(is_compared(handler) for handler in self._handlers.values()):
            return ""
        tensors = [tensor for handler in self._handlers.values() for tensor in handler.tensors()]
        hashed = hashlib.blake2b(super().digest().encode(), digest_size=16)
        hashed.update(np.array(_sums(tensors), np.int64).tobytes())
        hashed.update(repr([handler.numbers() for handler in self._handlers.values()]).encode())
        return hashed.hexdigest()

    def capture(self) -> None:
        """Record buffers and random generators for ``undo``; of parameters only what shows whether they changed."""
        super().capture()
        self._capture.take(self._held(torch.nn.Module), self._held(torch.optim.Optimizer))

    def undo(self) -> bool:
        """Restore buffers and random generators, and drop gradients.

        Returns:
            False if the step changed parameters, or may have changed them.
        """
        super().undo()
        return self._capture.undo()

    def _can_keep_steps(self) -> bool:
        return not self._held(HostMethods)  # a lost rank's part of the optimizer's state is in the last commit alone

    def _drop_unconfirmed(self) -> None:
        super()._drop_unconfirmed()
        for scaler in self._held(torch.amp.GradScaler):
            forget_step(scaler)  # the failed step has not reached update()

    def before_change(self) -> None:
        """Gather optimizer states that are sharded over the ranks."""
        for value in self._held(HostMethods):
            value._gather_shards()

    def checkpoint(self) -> dict[str, Any]:
        """Return all values, with tensors as numpy arrays."""
        states = {name: handler.state() for name, handler in self._handlers.items()}
        handled = {name: _to_arrays(state) for name, state in states.items() if state is not None}
        return {**_to_arrays(super().checkpoint()), "handled": handled}

    def load_checkpoint(self, values: Mapping[str, Any]) -> None:
        """Set all values that are both in the checkpoint and in this state.

        Raises:
            ValueError: a model, optimizer or sampler of this state is not in the checkpoint.
        """
        found = values.get("handled", {})
        if missing := [n for n, h in self._handlers.items() if n not in found and h.state() is not None]:
            raise ValueError(f"the checkpoint has no {missing[0]!r}")
        super().load_checkpoint(_to_tensors(values))
        for name, state in found.items():
            if (handler := self._handlers.get(name)) is not None:
                handler.load(_to_tensors(state))

    def _held(self, kind: type[T]) -> list[T]:
        return [value for value in self._values() if isinstance(value, kind)]

    def _values(self) -> Iterator[Any]:
        yield from super()._values()
        yield from (handler.value for handler in self._handlers.values())


def _handler_of(value: Any) -> Any:
    return next((make(value) for kind, make in get_handler_registry() if isinstance(value, kind)), None)


def _sums(tensors: list[torch.Tensor]) -> list[int]:
    """Return one checksum per tensor: the sum of its 64-bit words, remaining bytes and length in bytes."""
    found = []
    with torch.no_grad():
        for tensor in tensors:
            flat = (tensor.to_dense() if tensor.layout is not torch.strided else tensor).detach().contiguous()
            raw = as_bytes(flat)
            whole = raw.numel() // 8 * 8
            words = raw[:whole].view(torch.int64) if raw.storage_offset() % 8 == 0 else raw[:whole].clone().view(
                torch.int64
            )  # fmt: skip
            found.append(words.sum() + raw[whole:].sum(dtype=torch.int64) + raw.numel())
        if not found:
            return []
        totals: list[int] = torch.stack([total.to(found[0].device) for total in found]).tolist()
        return totals


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor for a digest: torch's own way gives its storage another key in each process."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    raw = as_bytes(dense.detach().to("cpu").contiguous())
    return tuple, ((str(tensor.dtype), tuple(tensor.shape), raw.numpy().tobytes()),)


def _to_arrays(value: Any) -> Any:
    """Return a value with tensors replaced by numpy arrays; bfloat16 tensors as their bits in int16."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").contiguous()
        bits = {torch.bfloat16: torch.int16}.get(plain.dtype)
        return {"tensor": plain.view(bits or plain.dtype).numpy(), "bits_of": "bfloat16" if bits else ""}
    if isinstance(value, Mapping):
        return {key: _to_arrays(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_arrays(item) for item in value)
    return value


def _to_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"tensor", "bits_of"}:
            tensor = torch.from_numpy(value["tensor"])
            return tensor.view(torch.bfloat16) if value["bits_of"] else tensor
        return {key: _to_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_tensors(item) for item in value)
    return value
