"""Adapter of TensorFlow's eager tensors: numpy arrays over the same memory as input and output."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from horovod.bindings.numpy_adapter import Array, ImmutableAdapter
from horovod.core.requests import ITEMSIZE

__all__ = ["DTYPES", "TensorFlowAdapter", "check_dtype", "wrap"]

#: The dtypes that the engine can move, by canonical name.
DTYPES: dict[str, tf.DType] = {name: getattr(tf, name) for name in ITEMSIZE}

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_from_dlpack = tf.experimental.dlpack.from_dlpack


def check_dtype(dtype: tf.DType) -> None:
    """Raise TypeError if the engine cannot move a dtype."""
    if dtype.name not in DTYPES:
        raise TypeError(f"Tensor type {dtype.name} is not supported. Supported: {', '.join(DTYPES)}")


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
        """Return an array over the memory of an eager tensor."""
        check_dtype(tensor.dtype)
        # numpy does not accept an ml_dtypes scalar from ``__array__``.
        array: Array = np.asarray(tensor) if tensor.shape.rank else np.asarray(tensor.numpy())
        return array

    def dtype_name(self, dtype: Any) -> str:
        """Return the canonical name of a dtype; float32 by default, as in TensorFlow."""
        return str(tf.as_dtype(tf.float32 if dtype is None else dtype).name)

    def splits(self, splits: Any) -> tuple[int, ...]:
        return super().splits(np.asarray(splits))

    def received_splits(self, splits: tuple[int, ...], like: Any) -> tf.Tensor:
        """Return received splits as an int32 tensor."""
        return tf.constant(splits, dtype=tf.int32)
