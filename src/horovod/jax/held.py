"""Values of arrays, kept beyond a step that donates them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from horovod.jax.trees import as_key, is_key

__all__ = ["Held", "hold", "release"]


class Held:
    """The value of an array that may be donated to a program; other objects are kept unchanged.

    On the CPU a numpy view is enough: XLA does not overwrite referenced memory, so no copy is made. On other devices it
    is a copy on the device.
    """

    __slots__ = ("_leaf", "_other")

    def __init__(self, leaf: Any) -> None:
        self._leaf, self._other = leaf, None
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            data = jax.random.key_data(leaf) if is_key(leaf) else leaf
            devices = data.devices()
            is_host = len(devices) == 1 and next(iter(devices)).platform == "cpu"
            self._other = np.asarray(data) if is_host else jax.numpy.copy(data)

    def value(self) -> Any:
        """Return the array, or an equal one if it was deleted."""
        leaf = self._leaf
        if self._other is None or not leaf.is_deleted():
            return leaf
        is_copy = isinstance(self._other, jax.Array)
        made = jax.numpy.copy(self._other) if is_copy else jax.device_put(np.array(self._other), leaf.sharding)
        return as_key(made, leaf) if is_key(leaf) else made


def hold(tree: Any) -> Any:
    """Return a pytree with each leaf in a ``Held``.

    Blocks until all arrays are computed.
    """
    return jax.tree.map(Held, tree)


def release(tree: Any) -> Any:
    """Return the original pytree of a result of ``hold``."""
    return jax.tree.map(lambda held: held.value(), tree, is_leaf=lambda leaf: isinstance(leaf, Held))
