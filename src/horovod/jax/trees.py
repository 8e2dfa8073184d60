"""Split pytrees into arrays to send and other leaves, which stay unchanged."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod.bindings.misuse import wrong_argument

__all__ = ["Leaves", "as_key", "is_key"]

_NUMBERS = (bool, int, float, complex, np.generic)
_MOVES_ROWS = ("allgather", "alltoall")
_LONGEST_PARTS = 200


def is_key(array: Any) -> bool:
    """Return whether an array holds typed random keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def as_key(data: Any, like: Any) -> Any:
    """Return integers as typed random keys, of the kind of ``like``."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))


class Leaves:
    """The arrays among the leaves of a pytree.

    Leaves that are not numbers (functions, strings, ``None``, ``float0`` gradients) are not arrays, and are returned
    unchanged. Typed random keys are sent as their integers.

    Args:
        tree: a pytree, or one array.
        verb: name of an operation that does not support all random keys; they raise RequestError.
        split_scalars: whether to separate numbers and 0-dimensional arrays, so that numbers keep their type.
    """

    def __init__(self, tree: Any, *, verb: str = "", split_scalars: bool = False) -> None:
        self._leaves, self._treedef = jax.tree.flatten(tree)
        self._sent: dict[int, Any] = {}  # what is sent, random keys as such, by its index among the leaves
        self.arrays: list[Any] = []  # the arrays, in the order of the tree; Python and numpy numbers become arrays
        self.scalars: dict[int, Any] = {}  # the separated scalars, by their index among the leaves
        for index, leaf in enumerate(self._leaves):
            if split_scalars and _is_number(leaf):
                self.scalars[index] = leaf
                continue
            array = _as_array(leaf)
            if array is None:
                if jax.tree_util.treedef_is_leaf(self._treedef):
                    raise TypeError(f"expected an array or a pytree of arrays, received {type(leaf).__name__}")
                continue
            if split_scalars and array.ndim == 0 and not is_key(array):
                self.scalars[index] = array
                continue
            self._sent[index] = array
            self.arrays.append(jax.random.key_data(array) if is_key(array) else array)
        if verb:
            self._refuse_keys(verb)

    @property
    def parts(self) -> str:
        """Paths of the leaves, shortened; empty for a single leaf, and if they cannot be compared."""
        try:
            return _parts(self._treedef)
        except Exception:  # a part of the structure has no hash, or a class refuses to be rebuilt from numbers
            return ""

    def _refuse_keys(self, verb: str) -> None:
        """Refuse random keys in reductions, and single keys in operations on rows."""
        moves = verb in _MOVES_ROWS
        keys = [index for index, array in self._sent.items() if is_key(array) and not (moves and array.ndim)]
        if not keys:
            return
        where = self._paths(keys)[0] or "the tensor"
        if moves:
            raise wrong_argument(f"{verb} of a single random key ({where}): it has no rows; use key[None]")
        raise wrong_argument(f"{verb} of random keys ({where}) is not defined; broadcast or allgather them")

    def rebuild(self, results: Sequence[Any], scalars: Mapping[int, Any] | None = None) -> Any:
        """Return the tree with ``results`` in place of ``arrays``, and with ``scalars`` at their leaf indices."""
        leaves = list(self._leaves)
        for index, scalar in (scalars or {}).items():
            leaves[index] = scalar
        for (index, array), result in zip(self._sent.items(), results, strict=True):
            leaves[index] = as_key(result, array) if is_key(array) else result
        return jax.tree.unflatten(self._treedef, leaves)

    def names(self) -> list[str]:
        """Return the paths of ``arrays`` in the tree, such as ``['dense']['kernel']``."""
        return self._paths(self._sent)

    def scalar_names(self) -> list[str]:
        """Return the paths of ``scalars`` in the tree."""
        return self._paths(self.scalars)

    def _paths(self, indexes: Iterable[int]) -> list[str]:
        paths = _paths(self._treedef, self._leaves)
        return [paths[index] for index in indexes]


def _paths(treedef: Any, leaves: Iterable[Any]) -> list[str]:
    tree = jax.tree.unflatten(treedef, leaves)
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


@functools.lru_cache(maxsize=1024)
def _parts(treedef: Any) -> str:
    text = ", ".join(_paths(treedef, range(treedef.num_leaves)))
    if len(text) <= _LONGEST_PARTS:
        return text
    return f"{text[:_LONGEST_PARTS]}... ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, _NUMBERS) and (not isinstance(leaf, np.generic) or _is_numeric(leaf.dtype))


def _is_numeric(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_))


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ndarray):
        return jnp.asarray(leaf) if _is_numeric(leaf.dtype) else None
    return jnp.asarray(leaf) if _is_number(leaf) or hasattr(leaf, "__jax_array__") else None
