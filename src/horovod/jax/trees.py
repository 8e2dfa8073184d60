"""Pytrees taken apart: the arrays that travel, and everything else, which stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod.bindings.misuse import wrong_argument

__all__ = ["Leaves", "is_key"]

_SCALARS = (bool, int, float, complex)
_MOVES_ROWS = ("allgather", "alltoall")


def is_key(array: Any) -> bool:
    """Return whether an array holds typed random keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


class Leaves:
    """The arrays among the leaves of a pytree.

    Leaves that are no numbers (functions, texts, ``None``, ``float0`` gradients) are no arrays, and come back as they
    are. Typed random keys travel as their integers.

    Args:
        tree: a pytree, or one array.
        scalars: whether Python's numbers travel too, as arrays.

    Attributes:
        arrays: what travels, in the order of the tree.
    """

    def __init__(self, tree: Any, *, scalars: bool = True) -> None:
        self._leaves, self._treedef = jax.tree.flatten(tree)
        self._restore: list[tuple[int, _Rewrap | None]] = []
        self.arrays: list[Any] = []
        for index, leaf in enumerate(self._leaves):
            array = _as_array(leaf, scalars)
            if array is None:
                if self.is_single and scalars:
                    raise TypeError(f"expected an array or a pytree of arrays, received {type(leaf).__name__}")
                continue
            restore = None
            if is_key(array):
                restore = _Rewrap(array)
                array = jax.random.key_data(array)
            self._restore.append((index, restore))
            self.arrays.append(array)

    @property
    def is_single(self) -> bool:
        """Whether the tree is one leaf, and no container."""
        return bool(jax.tree_util.treedef_is_leaf(self._treedef))

    def refuse_keys(self, verb: str) -> None:
        """Refuse random keys that an operation has no use for: they cannot be combined, and a single one has no rows.

        Args:
            verb: the operation.

        Raises:
            RequestError: there is one.
        """
        moves = verb in _MOVES_ROWS
        keys = [
            index for index, (_, restore) in enumerate(self._restore) if restore and (restore.is_single or not moves)
        ]
        if not keys:
            return
        where = self.names()[keys[0]] or "the tensor"
        if moves:
            raise wrong_argument(f"{verb} of a single random key ({where}): it has no rows; use key[None]")
        raise wrong_argument(f"{verb} of random keys ({where}) is not defined; broadcast or allgather them")

    def rebuild(self, results: Sequence[Any]) -> Any:
        """Return the tree with ``results`` in the places of ``arrays``."""
        leaves = list(self._leaves)
        for (index, restore), result in zip(self._restore, results, strict=True):
            leaves[index] = result if restore is None else restore(result)
        return jax.tree.unflatten(self._treedef, leaves)

    def names(self) -> list[str]:
        """Return the paths of ``arrays`` in the tree, such as ``['dense']['kernel']``."""
        paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(self._treedef, self._leaves))[0]
        return [jax.tree_util.keystr(paths[index][0]) for index, _ in self._restore]


class _Rewrap:
    """Makes keys of their integers again.

    Args:
        keys: what it was.

    Attributes:
        is_single: whether it was one key.
    """

    def __init__(self, keys: Any) -> None:
        self.is_single = not keys.ndim
        self._impl = jax.random.key_impl(keys)

    def __call__(self, data: Any) -> Any:
        return jax.random.wrap_key_data(data, impl=self._impl)


def _as_array(leaf: Any, scalars: bool) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        dtype = leaf.dtype
        is_number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
        return jnp.asarray(leaf) if is_number else None
    if isinstance(leaf, _SCALARS):
        return jnp.asarray(leaf) if scalars else None
    return jnp.asarray(leaf) if hasattr(leaf, "__jax_array__") else None
