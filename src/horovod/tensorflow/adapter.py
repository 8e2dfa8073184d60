"""Adapter of TensorFlow's eager tensors: numpy arrays over the same memory as input and output."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor

from horovod.bindings.numpy_adapter import Array, ImmutableAdapter

__all__ = ["DTYPES", "TensorFlowAdapter", "wrap"]

#: The dtypes that the engine can move, by canonical name.
DTYPES: dict[str, tf.DType] = {
    dtype.name: dtype
    for dtype in (
        tf.bool, tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64, tf.float16,
        tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128,
    )
}  # fmt: skip

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_from_dlpack = tf.experimental.dlpack.from_dlpack


def wrap(buffer: Array) -> tf.Tensor:
    """Return an eager tensor over a 64-byte aligned array; the tensor keeps the array alive."""
    if buffer.dtype == _BFLOAT16:
        return tf.bitcast(_from_dlpack(buffer.view(np.uint16).__dlpack__()), tf.bfloat16)
    return _from_dlpack(buffer.__dlpack__())


class TensorFlowAdapter(ImmutableAdapter):
    """See ``Adapter``."""

    name = "tensorflow"
    wrap = staticmethod(wrap)

    def buffer(self, tensor: Any) -> Array:
        """Return an array over the memory of an eager tensor; a copy for any other tensor-like value."""
        if not isinstance(tensor, EagerTensor):
            tensor = self._eager(tensor)
        if tensor.dtype.name not in DTYPES:
            raise TypeError(f"tensors of {tensor.dtype.name} cannot be sent; those of {', '.join(DTYPES)} can")
        # numpy does not accept an ml_dtypes scalar from ``__array__``.
        array: Array = np.asarray(tensor) if tensor.shape.rank else np.asarray(tensor.numpy())
        return array

    def _eager(self, tensor: Any) -> Any:
        if isinstance(tensor, tf.IndexedSlices):
            raise ValueError("IndexedSlices cannot be sent as they are; use allreduce(), or tf.convert_to_tensor()")
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            raise ValueError(f"a {type(tensor).__name__} cannot be sent as it is; send its parts, or a dense one")
        if isinstance(tensor, str | bytes) or tensor is None:
            raise TypeError(f"expected a tensor, received {type(tensor).__name__}")
        return tf.convert_to_tensor(tensor)

    def dtype_name(self, dtype: Any) -> str:
        """Return the canonical name of a dtype; float32 by default, as in TensorFlow."""
        return str(tf.as_dtype(tf.float32 if dtype is None else dtype).name)

    def splits(self, splits: Any) -> tuple[int, ...]:
        return super().splits(np.asarray(splits))

    def received_splits(self, splits: tuple[int, ...], like: Any) -> tf.Tensor:
        """Return received splits as an int32 tensor."""
        return tf.constant(splits, dtype=tf.int32)
