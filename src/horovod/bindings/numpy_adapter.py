"""Adapter of numpy arrays, and of frameworks with immutable tensors that can be read as numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.bindings.adapter import Adapter
from horovod.transports.kernels_numpy import numpy_dtype

__all__ = ["ImmutableAdapter", "NumpyAdapter", "aligned"]

Array = np.ndarray[Any, np.dtype[Any]]

#: Frameworks use foreign memory without a copy only at this alignment: the widest vector register in bytes.
_ALIGN_BYTES = 64


def aligned(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an uninitialised 64-byte aligned array, whose memory any framework can use without a copy."""
    kind = numpy_dtype(dtype)
    memory = np.empty(math.prod(shape) * kind.itemsize + _ALIGN_BYTES, np.uint8)
    array: Array = np.ndarray(shape, kind, memory, -memory.ctypes.data % _ALIGN_BYTES)
    return array


class NumpyAdapter(Adapter):
    """See ``Adapter``."""

    name = "numpy"
    kernels = "numpy"
    writable = True

    def buffer(self, tensor: Any) -> Array | None:
        if not isinstance(tensor, np.ndarray):
            raise TypeError(f"expected a numpy array, received {type(tensor).__name__}; use numpy.asarray()")
        if type(tensor) is not np.ndarray:
            if np.ma.is_masked(tensor):
                raise ValueError("a numpy array with masked elements cannot be sent; replace them first, with filled()")
            # A subclass may refuse the kernels' functions, or keep two dimensions when reshaped, like numpy.matrix.
            tensor = np.asarray(tensor)
        return tensor if tensor.flags.c_contiguous else None

    def target(self, tensor: Any) -> Array | None:
        """Return the array itself, None if it is not C-contiguous; it must not be read-only."""
        buffer = self.buffer(tensor)
        if not tensor.flags.writeable:
            raise ValueError(
                "a read-only numpy array cannot be the target of an operation in place; use the operation without _, "
                "or copy the array first"
            )
        return buffer

    def wrap(self, buffer: Array) -> Any:
        return buffer

    def address(self, buffer: Array) -> int:
        return buffer.ctypes.data

    def device(self, tensor: Array) -> str:
        return "cpu"

    def stage(self, tensors: Sequence[Array], targets: Sequence[Array] | None) -> Any:
        """Never called: numpy has no devices."""
        raise NotImplementedError

    def passed(self, tensors: Sequence[Array]) -> Any:
        """Never called, as ``stage``."""
        raise NotImplementedError

    def contiguous(self, tensor: Array) -> Array:
        return np.array(tensor, order="C", copy=True)

    def write_back(self, tensor: Array, buffer: Array) -> None:
        np.copyto(np.asarray(tensor), buffer)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Array:
        return np.empty(shape, dtype=numpy_dtype(dtype))

    def over(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Array:
        array: Array = np.ndarray(shape, dtype=numpy_dtype(dtype), buffer=memory)
        return array

    def dtype_name(self, dtype: Any) -> str:
        """Return the canonical name of a dtype; float64 by default, as in numpy."""
        return str((numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)).name)

    def splits(self, splits: Any) -> tuple[int, ...]:
        array = np.asarray(splits)
        if (array.size and array.dtype.kind not in "iu") or array.ndim != 1:
            raise ValueError(f"splits must be a one-dimensional sequence of integers, received {splits!r}")
        return tuple(int(split) for split in array)

    def received_splits(self, splits: tuple[int, ...], like: Any) -> Array:
        return np.array(splits, dtype=np.int32)


class ImmutableAdapter(NumpyAdapter):
    """Base of adapters with immutable tensors whose memory numpy can read.

    A framework provides ``name``, ``buffer`` and ``wrap``, and its conversions of dtypes and splits.
    """

    writable = False

    def buffer(self, tensor: Any) -> Array | None:
        """Return a contiguous alias, which may be read-only; None if the elements do not lie one after the other."""
        raise NotImplementedError

    def wrap(self, buffer: Array) -> Any:
        """Return the framework's tensor over a 64-byte aligned array, which does not change any more."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Array:
        """Return an uninitialised array that ``wrap`` can use without a copy."""
        return aligned(shape, dtype)
