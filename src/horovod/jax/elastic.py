"""Elastic training with JAX: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from horovod.bindings.elastic import common_names
from horovod.bindings.elastic.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.elastic.shard import shard
from horovod.bindings.elastic.state import ObjectState
from horovod.bindings.elastic.step import decorators
from horovod.bindings.elastic.variables import VariablesState, check_shapes
from horovod.jax.failures import typed_errors
from horovod.jax.functions import broadcast_parameters
from horovod.jax.held import hold, release
from horovod.jax.trees import as_key, is_key

__all__ = ["JaxState", "run", "shard", "step"]
__all__ += common_names.__all__

run, step = decorators(typed_errors, jax.block_until_ready)


class JaxState(VariablesState):
    """State of pytrees, such as parameters, the optimizer's state and random keys, and of plain values.

    Commits and steps copy no arrays. On the CPU this includes donated ones (``donate_argnums``): XLA never overwrites
    an array while the state references its memory. On other devices arrays are copied on the device. So a failed step
    leaves the arrays unchanged.

    Args:
        **kwargs: attributes of the state, such as ``params=params, opt_state=opt_state, batch=0``. Attributes that
            initially contain JAX arrays are pytrees, with the same structure on every rank. The state replaces them:
            use ``state.params``, not ``params``; the same holds for modules of ``flax.nnx``.

    Raises:
        ValueError: a keyword is the name of a method.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._check_names(kwargs)
        self._names = [name for name, value in kwargs.items() if _has_arrays(value)]
        self._set({name: kwargs.pop(name) for name in self._names})
        super().__init__(**kwargs)

    def _set(self, trees: Mapping[str, Any]) -> None:
        for name, tree in trees.items():
            setattr(self, name, tree)

    def _trees(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    # The "variables" of this state are names of attributes.

    def _shared(self) -> Sequence[Any]:
        return self._names

    def _changed_early(self) -> Sequence[Any]:
        return self._names

    def _hold(self, variables: Sequence[Any]) -> Sequence[Any]:
        return [hold(getattr(self, name)) for name in variables]

    def _put(self, variables: Sequence[Any], held: Sequence[Any]) -> None:
        self._set({name: release(tree) for name, tree in zip(variables, held, strict=True)})

    def _arrays(self, variables: Sequence[Any]) -> Sequence[Any]:
        leaves = jax.tree.leaves([getattr(self, name) for name in variables])
        return [found for leaf in leaves if (found := _array(leaf)) is not None]

    def _send(self) -> None:
        self._set(broadcast_parameters(self._trees(), 0))

    def load_checkpoint(self, values: Mapping[str, Any]) -> None:
        """Load the result of ``checkpoint``.

        Raises:
            ValueError: the checkpoint has other pytrees.
        """
        found = list(values["variables"])
        # Not a dict, which JAX flattens in the order of its sorted keys.
        leaves, structure = jax.tree.flatten([*self._trees().values()])
        arrays = {number: array for number, leaf in enumerate(leaves) if (array := _array(leaf)) is not None}
        check_shapes(found, [array.shape for array in arrays.values()])
        for number, value in zip(arrays, found, strict=True):
            leaves[number] = _like(leaves[number], value)
        ObjectState.load_checkpoint(self, values)
        self._set(dict(zip(self._names, jax.tree.unflatten(structure, leaves), strict=True)))


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def _array(leaf: Any) -> Any:
    """Return an array or number as a numpy array; None for other leaves."""
    if isinstance(leaf, jax.Array):
        return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return np.asarray(leaf) if isinstance(leaf, bool | int | float | complex | np.generic | np.ndarray) else None


def _like(leaf: Any, value: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return value if isinstance(leaf, np.ndarray) else type(leaf)(value)
    made = jax.device_put(value, leaf.sharding)
    return as_key(made, leaf) if is_key(leaf) else made
