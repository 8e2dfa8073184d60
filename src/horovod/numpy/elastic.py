"""Elastic training with numpy: ``import horovod.numpy as hvd``, then ``hvd.elastic.run``; see docs/elastic.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from horovod.bindings.elastic import common_names
from horovod.bindings.elastic.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.shard import shard
from horovod.bindings.elastic.state import ObjectState
from horovod.bindings.elastic.step import step
from horovod.bindings.objects import broadcast_object
from horovod.bindings.runtime import comm

__all__ = ["NumpyState", "run", "shard", "step"]
__all__ += common_names.__all__


def _can_be_written(value: Any) -> TypeGuard[np.ndarray[Any, Any]]:
    return isinstance(value, np.ndarray) and value.flags.writeable


class NumpyState(ObjectState):
    """A state of arrays and plain objects: each keyword becomes an attribute.

    Arrays keep their memory: they are restored and sent in place. A step of ``hvd.elastic.step`` copies those that can
    be written, because it may change them before it fails.

    Args:
        **kwargs: attributes and their first values.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._kept: dict[str, Any] = {}
        super().__init__(bcast_object=broadcast_object, get_rank=comm.rank, **kwargs)

    def capture(self) -> None:
        """See ``State``; also copy the arrays, into the memory of the last copies."""
        super().capture()
        old, self._kept = self._kept, {}
        for name, value in self._present().items():
            if _can_be_written(value):
                kept = old.get(name)
                is_alike = kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype)
                self._kept[name] = kept if is_alike else np.empty_like(value)
                np.copyto(self._kept[name], value)

    def undo(self) -> bool:
        is_undone = super().undo()
        for name, kept in self._kept.items():
            np.copyto(getattr(self, name), kept)
        return is_undone

    def sync(self) -> None:
        """Give all ranks rank 0's values. Collective."""
        arrays = {name: value for name, value in self._present().items() if _can_be_written(value)}
        if not self._all_equal:
            # Training may have given rank 0 an array of another shape than a new rank has, or the first one.
            kinds = self._bcast_object({name: (value.shape, value.dtype) for name, value in arrays.items()})
            fitting = {name for name, value in arrays.items() if (value.shape, value.dtype) == kinds.get(name)}
            arrays = {name: arrays[name] if name in fitting else np.empty(*kind) for name, kind in kinds.items()}
            for name, value in arrays.items():
                whole = np.ascontiguousarray(value)
                comm.broadcast_(whole, 0, name=f"elastic.{name}")
                np.copyto(value, whole)
                setattr(self, name, value)
        saved, self._saved_state = self._saved_state, {n: v for n, v in self._saved_state.items() if n not in arrays}
        try:
            super().sync()
        finally:
            self._saved_state = {name: self._saved_state.get(name, value) for name, value in saved.items()}

    def _load(self, states: Mapping[str, Any]) -> None:
        others = {}
        for name, value in states.items():
            mine = getattr(self, name, None)
            if _can_be_written(mine) and isinstance(value, np.ndarray) and mine.shape == value.shape:
                np.copyto(mine, value)
            else:
                others[name] = value
        super()._load(others)
