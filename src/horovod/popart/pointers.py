"""Arrays over the memory of stream callbacks: PopART passes a ``void *`` in a capsule."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Array", "array_at"]

Array = np.ndarray[Any, np.dtype[Any]]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def array_at(pointer: Any, shape: Sequence[int], dtype: str) -> Array:
    """Return an array over the caller's memory; it is valid only while the callback runs.

    Args:
        pointer: a capsule without a name, as PopART's Python passes it; or an address.
        shape: shape of the tensor.
        dtype: NumPy's name of the dtype.
    """
    kind = np.dtype(dtype)
    address = pointer if isinstance(pointer, int) else _pointer_of(pointer, None)
    memory: Any = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(address)
    array: Array = np.ndarray(tuple(shape), kind, memory)
    return array
