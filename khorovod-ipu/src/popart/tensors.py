"""``TensorInfo``, the dtype and shape of a tensor, and the table of dtypes in PopART, NumPy, torch and ONNX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch

from popart.enums import DataType
from popart.errors import popart_exception

__all__ = ["Array", "TensorInfo", "from_torch", "onnx_type", "to_numpy", "torch_type"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class _Dtype:
    name: str
    numpy: Any
    torch: torch.dtype
    onnx: int


_DTYPES = [
    _Dtype(row, getattr(np, name), getattr(torch, name.rstrip("_")), onnx.TensorProto.DataType.Value(row))
    for row, name in {
        "FLOAT": "float32", "FLOAT16": "float16", "DOUBLE": "float64", "INT8": "int8", "INT16": "int16",
        "INT32": "int32", "INT64": "int64", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32",
        "UINT64": "uint64", "BOOL": "bool_",
    }.items()
]  # fmt: skip
_BY_NAME = {row.name: row for row in _DTYPES}
_BY_NUMPY = {np.dtype(row.numpy): row for row in _DTYPES}
_BY_TORCH = {row.torch: row for row in _DTYPES}
_BY_ONNX = {row.onnx: row for row in _DTYPES}


def _row(dtype: Any) -> _Dtype:
    dtype = dtype.name if isinstance(dtype, DataType) else dtype
    if isinstance(dtype, str) and dtype.upper() in _BY_NAME:
        return _BY_NAME[dtype.upper()]
    if isinstance(dtype, torch.dtype) and dtype in _BY_TORCH:
        return _BY_TORCH[dtype]
    try:
        return _BY_NUMPY[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise popart_exception(f"{dtype!r} is not a dtype of a tensor. Expected one of {', '.join(_BY_NAME)}") from None


class TensorInfo:
    """Dtype and shape of a tensor.

    Args:
        dtype: a name such as ``"FLOAT"``, a NumPy dtype, or an array with dtype and shape.
        shape: dimensions; omitted for an array.

    Raises:
        popart_exception: the dtype or the shape is invalid.
    """

    def __init__(self, dtype: Any, shape: Sequence[int] | None = None) -> None:
        if isinstance(dtype, np.ndarray) and shape is None:
            dtype, shape = dtype.dtype, dtype.shape
        if shape is None:
            raise popart_exception(f"TensorInfo takes a dtype and a shape, or an array; received only {dtype!r}")
        dims = tuple(int(dim) for dim in shape)
        if any(dim < 0 for dim in dims):
            raise popart_exception(f"a dimension cannot be negative; received the shape {list(dims)}")
        self._row, self._shape = _row(dtype), dims

    def shape(self) -> list[int]:
        """Return the dimensions."""
        return list(self._shape)

    def rank(self) -> int:
        """Return the number of dimensions."""
        return len(self._shape)

    def dim(self, index: int) -> int:
        """Return one dimension."""
        return self._shape[index]

    def nelms(self) -> int:
        """Return the number of elements."""
        return math.prod(self._shape)

    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self.nelms() * int(np.dtype(self._row.numpy).itemsize)

    def data_type(self) -> str:
        """Return the dtype's name, as in ``FLOAT``."""
        return self._row.name

    def data_type_lcase(self) -> str:
        """Return NumPy's name of the dtype, as in ``float32``."""
        return str(np.dtype(self._row.numpy).name)

    def numpy_dtype(self) -> np.dtype[Any]:
        """Return NumPy's dtype."""
        found: np.dtype[Any] = np.dtype(self._row.numpy)
        return found

    def torch_dtype(self) -> torch.dtype:
        """Return torch's dtype."""
        return self._row.torch

    def onnx_dtype(self) -> int:
        """Return ONNX's number of the dtype."""
        return int(self._row.onnx)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorInfo) and (self._row, self._shape) == (other._row, other._shape)

    def __hash__(self) -> int:
        return hash((self._row.name, self._shape))

    def __repr__(self) -> str:
        return f"TensorInfo({self._row.name!r}, {list(self._shape)})"


def torch_type(onnx_number: int) -> torch.dtype:
    """Return torch's dtype for an ONNX number."""
    if onnx_number not in _BY_ONNX:
        raise popart_exception(f"the software device knows no dtype {onnx.TensorProto.DataType.Name(onnx_number)}")
    return _BY_ONNX[onnx_number].torch


def onnx_type(dtype: Any) -> int:
    """Return ONNX's number for a name, or a dtype of NumPy or torch."""
    return int(_row(dtype).onnx)


def from_torch(tensor: torch.Tensor) -> TensorInfo:
    """Return dtype and shape of a torch tensor."""
    return TensorInfo(tensor.dtype, tensor.shape)


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a contiguous array with a tensor's values, over its memory if possible."""
    array: Array = tensor.detach().contiguous().numpy()
    return array
