"""The adapter of numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["NumpyAdapter"]

Array = np.ndarray[Any, np.dtype[Any]]


class NumpyAdapter:
    """See ``Adapter``."""

    name = "numpy"
    kernels = "numpy"

    def buffer(self, tensor: Any) -> Array | None:
        """Return the array itself if it is C-contiguous."""
        if not isinstance(tensor, np.ndarray):
            raise TypeError(f"expected a numpy array, received {type(tensor).__name__}; use numpy.asarray()")
        return tensor if tensor.flags.c_contiguous else None

    def address(self, buffer: Array) -> int:
        """Return the address of an array's first byte."""
        return buffer.ctypes.data

    def device(self, tensor: Array) -> str:
        """Return ``cpu``."""
        return "cpu"

    def stage(self, tensors: Sequence[Array], targets: Sequence[Array] | None) -> Any:
        """Never called: numpy knows no devices."""
        raise NotImplementedError

    def contiguous(self, tensor: Array) -> Array:
        """Return a contiguous copy."""
        return np.array(tensor, order="C", copy=True)

    def write_back(self, tensor: Array, buffer: Array) -> None:
        """Copy ``buffer`` over ``tensor``."""
        np.copyto(tensor, buffer)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Array:
        """Return an uninitialised array."""
        return np.empty(shape, dtype=dtype)

    def over(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array over a buffer."""
        array: Array = np.ndarray(shape, dtype=dtype, buffer=memory)
        return array

    def dtype_name(self, dtype: Any) -> str:
        """Return the canonical name of a dtype; float64 by default, as in numpy."""
        return str(np.dtype(dtype).name)

    def splits(self, splits: Any) -> tuple[int, ...]:
        """Return splits as numbers."""
        array = np.asarray(splits)
        if (array.size and array.dtype.kind not in "iu") or array.ndim != 1:
            raise ValueError(f"splits must be a one-dimensional sequence of integers, received {splits!r}")
        return tuple(int(split) for split in array)

    def received_splits(self, splits: tuple[int, ...], like: Any) -> Array:
        """Return received splits as an int32 array."""
        return np.array(splits, dtype=np.int32)
