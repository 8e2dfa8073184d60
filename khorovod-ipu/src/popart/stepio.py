"""Inputs and anchors of one ``run()``: arrays, or callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol

import numpy as np

from popart.errors import popart_exception, unknown
from popart.tensors import Array, TensorInfo

__all__ = ["Factors", "PyStepIO", "PyStepIOCallback", "PyWeightsIO", "StepIO"]


class Factors:
    """The number of micro-batches of one ``run()``, by its factors.

    Args:
        batches: number of optimizer steps.
        accumulation: number of micro-batches per step and replica.
        replicas: number of replicas in this process.
    """

    def __init__(self, batches: int, accumulation: int, replicas: int) -> None:
        self.batches, self.accumulation, self.replicas = batches, accumulation, replicas

    def product(self) -> int:
        """Return the number of micro-batches."""
        return self.batches * self.accumulation * self.replicas

    def __str__(self) -> str:
        batches = f"{self.batches} batches per step"
        return f"{batches} x {self.accumulation} accumulated micro-batches x {self.replicas} replicas"


class StepIO(Protocol):
    """The methods that a session calls."""

    def begin(
        self, inputs: Mapping[str, TensorInfo], outputs: Mapping[str, TensorInfo], factors: Factors, spare: Set[str]
    ) -> None:
        """Check given arrays, if there are any, against those needed for one run; ``spare`` are unused inputs."""
        return

    def feed(self, name: str, info: TensorInfo) -> Array:
        """Return an input of the next micro-batch; called once per micro-batch and input."""

    def give(self, name: str, value: Array) -> None:
        """Receive the next piece of an anchor."""


class PyStepIO(StepIO):
    """Arrays of inputs and for anchors.

    Args:
        inputs: by id: the elements of all micro-batches of a run, one micro-batch after the other, replica by replica;
            only the number of elements is checked, not the shape.
        outputs: by id: arrays of ``initAnchorArrays()``.

    Raises:
        popart_exception: an array is not contiguous.
    """

    def __init__(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self._inputs = {name: _array(name, value, "input") for name, value in inputs.items()}
        self._outputs = {name: _array(name, value, "anchor") for name, value in outputs.items()}
        self._at: dict[str, int] = {}
        self._out: dict[str, int] = {}
        self._asserts = True

    def enableRuntimeAsserts(self, b: bool) -> None:
        """Set whether numbers of elements are checked; without it, short inputs are read again from the start."""
        self._asserts = bool(b)

    def begin(
        self, inputs: Mapping[str, TensorInfo], outputs: Mapping[str, TensorInfo], factors: Factors, spare: Set[str]
    ) -> None:
        for name in self._inputs.keys() - inputs.keys() - spare:
            raise unknown("an input that this session reads", name, inputs)
        for name, info in inputs.items():
            if name not in self._inputs:
                raise popart_exception(f"the input {name!r} is missing in PyStepIO; it is {info}, for each micro-batch")
            self._check(name, self._inputs[name], info, info.nelms() * factors.product(), f"{info.nelms()} x {factors}")
        for name in self._outputs.keys() - outputs.keys():
            raise unknown("an anchor of this session's DataFlow", name, outputs)
        for name, info in outputs.items():
            if name in self._outputs:
                self._check(name, self._outputs[name], info, info.nelms(), f"the shape {info.shape()}")
        self._out = dict.fromkeys(self._outputs, 0)
        if self._asserts:
            self._at = dict.fromkeys(self._inputs, 0)

    def _check(self, name: str, array: Array, info: TensorInfo, count: int, why: str) -> None:
        if array.dtype != info.numpy_dtype():
            raise popart_exception(
                f"{name!r} must be an array of {info.data_type_lcase()}; received {array.dtype}. "
                f"Pass it as array.astype(np.{info.data_type_lcase()})"
            )
        if self._asserts and array.size != count:
            raise popart_exception(
                f"{name!r} must have {count} elements, {why}; received {array.size}, the shape {list(array.shape)}"
            )
        if not array.size and count:
            raise popart_exception(f"{name!r} is empty; it must have {count} elements")

    def feed(self, name: str, info: TensorInfo) -> Array:
        flat, count = self._inputs[name].reshape(-1), info.nelms()
        start = self._at.get(name, 0)
        places = (
            np.arange(start, start + count) % flat.size if start + count > flat.size else slice(start, start + count)
        )
        self._at[name] = (start + count) % flat.size
        return flat[places].reshape(info.shape())

    def give(self, name: str, value: Array) -> None:
        if name not in self._outputs:
            return
        flat, start = self._outputs[name].reshape(-1), self._out[name]
        count = min(value.size, flat.size - start)
        flat[start : start + count] = value.reshape(-1)[:count]
        self._out[name] = start + count


class PyStepIOCallback(StepIO):
    """Functions that provide inputs and take anchors, micro-batch by micro-batch.

    Args:
        input_callback: called with an id and whether this is ahead of time; returns an array.
        input_complete_callback: called with an id after its array was read.
        output_callback: called with an id; returns the array to fill.
        output_complete_callback: called with an id after its array was filled.
    """

    def __init__(
        self,
        input_callback: Callable[[str, bool], Any],
        input_complete_callback: Callable[[str], Any],
        output_callback: Callable[[str], Any],
        output_complete_callback: Callable[[str], Any],
    ) -> None:
        self._input, self._input_complete = input_callback, input_complete_callback
        self._output, self._output_complete = output_callback, output_complete_callback

    def feed(self, name: str, info: TensorInfo) -> Array:
        given = self._input(name, False)
        if given is None:
            raise popart_exception(f"the callback returned nothing for the input {name!r}; it is {info}")
        array = _array(name, given, "input")
        if array.dtype != info.numpy_dtype() or array.size != info.nelms():
            raise popart_exception(f"the callback gave {array.dtype} {list(array.shape)} for {name!r}; it is {info}")
        taken: Array = array.reshape(info.shape()).copy()
        self._input_complete(name)
        return taken

    def give(self, name: str, value: Array) -> None:
        target = _array(name, self._output(name), "anchor")
        if target.size != value.size or target.dtype != value.dtype:
            raise popart_exception(
                f"the callback gave an array of {target.dtype} {list(target.shape)} for the anchor {name!r}, whose "
                f"values are {value.dtype} {list(value.shape)}"
            )
        target.reshape(-1)[:] = value.reshape(-1)
        self._output_complete(name)


class PyWeightsIO:
    """Arrays of weights, by id: ``readWeights`` fills them, ``writeWeights`` reads them.

    Args:
        weights: contiguous arrays.

    Raises:
        popart_exception: an array is not contiguous.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.weights = {name: _array(name, value, "weight") for name, value in weights.items()}


def _array(name: str, value: Any, what: str) -> Array:
    if not isinstance(value, np.ndarray):
        raise popart_exception(f"the {what} {name!r} must be an array of NumPy; received {type(value).__name__}")
    if not value.flags.c_contiguous:
        raise popart_exception(f"the {what} {name!r} is not contiguous. Use numpy.ascontiguousarray()")
    return value
