"""Describe an optimizer's state without tensor values, and apply a description to another optimizer.

A description can be pickled and sent; the tensors are sent separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["StateDescription", "apply_state", "dense_stride", "describe_state", "parameters_of", "tensors_of"]

# These keys identify a group; they are not options.
_NOT_OPTIONS = ("params", "param_names")


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``tensor`` if it fills its memory without gaps, else contiguous strides."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= length
    return tensor.stride()


@dataclass(frozen=True)
class _Blank:
    """Placeholder for a tensor whose values are sent separately."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def like(cls, tensor: torch.Tensor) -> _Blank:
        return cls(tuple(tensor.shape), dense_stride(tensor), tensor.dtype, tensor.device.type)

    def fits(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and _is_plain(value)
            and value.shape == self.shape
            and value.dtype == self.dtype
            and value.device.type == self.device
        )

    def make(self, near: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor of this shape, on the device of ``near`` if its device type fits."""
        device = near.device if near is not None and near.device.type == self.device else torch.device(self.device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class StateDescription:
    """The state and options of an optimizer."""

    kind: str  # name of the optimizer's class
    shapes: tuple[tuple[tuple[int, ...], ...], ...]  # shape of every parameter, by group
    options: tuple[dict[str, Any], ...]  # options of every group
    states: dict[int, Any]  # state of every parameter that has one, by the parameter's index
    extras: dict[Any, Any]  # state under keys that are not parameters

    def misfit(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the difference that prevents ``optimizer`` from taking this state, or an empty string."""
        if type(optimizer).__name__ != self.kind:
            return f"{type(optimizer).__name__}, not {self.kind}"
        own = _shapes(optimizer)
        if len(own) != len(self.shapes):
            return f"{len(own)} parameter groups, not {len(self.shapes)}"
        for index, (mine, wanted) in enumerate(zip(own, self.shapes, strict=True)):
            if len(mine) != len(wanted):
                return f"{len(mine)} parameters in group {index}, not {len(wanted)}"
            for number, (shape, other) in enumerate(zip(mine, wanted, strict=True)):
                if shape != other:
                    return f"shape {list(shape)} of parameter {number} of group {index}, not {list(other)}"
        return ""


def describe_state(optimizer: torch.optim.Optimizer) -> StateDescription:
    """Return the state and options of ``optimizer``, without the values of its tensors."""
    states, extras = _split_state(optimizer)
    options = tuple(
        {key: _blanked(value) for key, value in group.items() if key not in _NOT_OPTIONS}
        for group in optimizer.param_groups
    )
    return StateDescription(type(optimizer).__name__, _shapes(optimizer), options, _blanked(states), _blanked(extras))


def apply_state(optimizer: torch.optim.Optimizer, description: StateDescription) -> None:
    """Set the state and options of ``optimizer`` to a description; new tensors are uninitialised.

    Existing tensors that fit are reused, so that other references to them see the new values.
    """
    states, extras = _split_state(optimizer)
    parameters = parameters_of(optimizer)
    optimizer.state.clear()
    for number, state in description.states.items():
        parameter = parameters[number]
        optimizer.state[parameter] = _filled(state, states.get(number), parameter)
    for key, state in description.extras.items():
        optimizer.state[key] = _filled(state, extras.get(key), None)
    for group, options in zip(optimizer.param_groups, description.options, strict=True):
        near = group["params"][0] if group["params"] else None
        for key in set(group) - set(options) - set(_NOT_OPTIONS):
            del group[key]
        for key, value in options.items():
            group[key] = _filled(value, group.get(key), near)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the optimizer, with a name that is the same on all ranks."""
    states, extras = _split_state(optimizer)
    yield from _walk("state", states)
    yield from _walk("extra", extras)
    for index, group in enumerate(optimizer.param_groups):
        for key in sorted(key for key in group if key not in _NOT_OPTIONS):
            yield from _walk(f"group.{index}.{key}", group[key])


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _split_state(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[Any, Any]]:
    numbers = {id(p): number for number, p in enumerate(parameters_of(optimizer))}
    states: dict[int, Any] = {}
    extras: dict[Any, Any] = {}
    for key, value in optimizer.state.items():
        if id(key) in numbers:
            states[numbers[id(key)]] = value
        else:
            extras[key] = value
    return states, extras


def _shapes(optimizer: torch.optim.Optimizer) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(tuple(p.shape) for p in group["params"]) for group in optimizer.param_groups)


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor, which is sent separately; sparse ones are pickled."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _blanked(value: Any) -> Any:
    if _is_plain(value):
        return _Blank.like(value)
    if isinstance(value, dict):
        return {key: _blanked(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_blanked(item) for item in value)
    return value


def _filled(value: Any, mine: Any, near: torch.Tensor | None) -> Any:
    """Undo ``_blanked``; reuse this rank's own tensors if they fit."""
    if isinstance(value, _Blank):
        return mine if value.fits(mine) else value.make(near)
    if isinstance(value, dict):
        known = mine if isinstance(mine, dict) else {}
        return {key: _filled(item, known.get(key), near) for key, item in value.items()}
    if type(value) in (list, tuple):
        known_items = list(mine) if type(mine) in (list, tuple) and len(mine) == len(value) else [None] * len(value)
        return type(value)(_filled(item, own, near) for item, own in zip(value, known_items, strict=True))
    return value


def _walk(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if _is_plain(value):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _walk(f"{name}.{key}", value[key])
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{name}.{index}", item)
