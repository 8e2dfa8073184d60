"""The adapter of JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod.bindings.numpy_adapter import ImmutableAdapter

__all__ = ["JaxAdapter"]

Array = np.ndarray[Any, np.dtype[Any]]

#: JAX takes half as long to copy so little as to adopt it, by a program that it compiles for each shape, and keeps:
#: some 20 ms and 1.5 MB. So only few shapes get one, and those by being common; others take the longer way.
_COPIED_BYTES = 65536
_COMMON, _MOST_COMMON, _MOST_COUNTED = 16, 32, 1024


class JaxAdapter(ImmutableAdapter):
    """See ``Adapter``. Results are arrays of JAX's default device, over the memory that the ranks filled."""

    name = "jax"

    def __init__(self) -> None:
        self._counts: dict[tuple[Any, ...], int] = {}
        self._common: set[tuple[Any, ...]] = set()

    def buffer(self, tensor: Any) -> Array | None:
        """Return the array's memory, read-only, once it is computed; from a device other than the CPU, a copy."""
        if not isinstance(tensor, jax.Array):
            raise TypeError(f"expected a JAX array, received {type(tensor).__name__}; use jax.numpy.asarray()")
        array = np.asarray(tensor)
        return array if array.flags.c_contiguous else None

    def wrap(self, buffer: Array) -> jax.Array:
        """Return an array over the buffer, or of a copy if that is small."""
        is_small = buffer.nbytes <= _COPIED_BYTES
        if is_small and self._is_common((buffer.dtype, buffer.shape)):
            return jnp.asarray(buffer)
        return jax.device_put(buffer, may_alias=not is_small)

    def _is_common(self, form: tuple[Any, ...]) -> bool:
        if form in self._common:
            return True
        if len(self._common) >= _MOST_COMMON:
            return False
        if len(self._counts) >= _MOST_COUNTED:
            self._counts.clear()
        self._counts[form] = uses = self._counts.get(form, 0) + 1
        if uses < _COMMON:
            return False
        self._common.add(form)
        return True
