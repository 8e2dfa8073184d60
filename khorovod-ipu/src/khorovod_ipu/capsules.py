"""Pointers in PopART's Python format: capsules without a name, meant to be read only by native code."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

__all__ = ["array_behind", "capsule_of"]

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_get = ctypes.pythonapi.PyCapsule_GetPointer
_get.restype, _get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

#: The target of a capsule of an empty array: a capsule cannot hold a null pointer.
_NOTHING = ctypes.create_string_buffer(1)


def capsule_of(array: np.ndarray[Any, np.dtype[Any]]) -> object:
    """Return a capsule with the address of an array; the array must live as long as the capsule is used."""
    address = array.ctypes.data if array.nbytes else ctypes.addressof(_NOTHING)
    capsule: object = _new(address, None, None)
    return capsule


def array_behind(capsule: Any, shape: Any, dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array over the memory that a capsule points to.

    Args:
        capsule: capsule that a stream callback receives.
        shape: shape of the tensor, from ``session.getInfo(weight).shape()``.
        dtype: dtype of the tensor, from ``session.getInfo(weight).data_type_lcase()``.
    """
    kind = np.dtype(dtype)
    memory: Any = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(_get(capsule, None))
    array: np.ndarray[Any, np.dtype[Any]] = np.ndarray(tuple(shape), kind, memory)
    return array
