"""Adapter of JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from horovod.bindings.numpy_adapter import ImmutableAdapter

__all__ = ["JaxAdapter"]

Array = np.ndarray[Any, np.dtype[Any]]

#: Up to this size, a copy takes JAX half as long as wrapping the memory without a copy.
_COPIED_BYTES = 65536


class JaxAdapter(ImmutableAdapter):
    """See ``Adapter``. Results are arrays of JAX's default device, over the memory that the ranks filled."""

    name = "jax"

    def buffer(self, tensor: Any) -> Array | None:
        """Wait for the array, and return its memory, read-only; for devices other than the CPU, a copy."""
        if not isinstance(tensor, jax.Array):
            raise TypeError(f"expected a JAX array, received {type(tensor).__name__}; use jax.numpy.asarray()")
        array = np.asarray(tensor)
        return array if array.flags.c_contiguous else None

    def wrap(self, buffer: Array) -> jax.Array:
        """Return an array over the buffer, or over a copy of a small buffer."""
        return jax.device_put(buffer, may_alias=buffer.nbytes > _COPIED_BYTES)
