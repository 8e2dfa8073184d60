"""Elastic training with numpy: ``import horovod.numpy as hvd``, then ``hvd.elastic.run``; see docs/elastic.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from horovod.bindings.collectives import Collectives
from horovod.bindings.elastic.leave import on_leave
from horovod.bindings.elastic.rates import LearningRateScale, passes_for
from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.shard import shard
from horovod.bindings.elastic.state import ObjectState, State
from horovod.bindings.elastic.step import step
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.bindings.objects import broadcast_object

__all__ = ["LearningRateScale", "NumpyState", "ObjectState", "State", "on_leave", "passes_for", "run", "shard", "step"]

_comm = Collectives(NumpyAdapter())


class NumpyState(ObjectState):
    """A state of arrays and plain objects: each keyword becomes an attribute.

    Arrays keep their memory: they are restored and sent in place.

    Args:
        **kwargs: attributes and their first values.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=_comm.rank, **kwargs)

    def sync(self) -> None:
        """Give all ranks rank 0's values. Collective."""
        present = self._present()
        arrays = {name: value for name, value in present.items() if isinstance(value, np.ndarray)}
        if not self._all_equal:
            for name in sorted(arrays):
                whole = np.ascontiguousarray(arrays[name])
                _comm.broadcast_(whole, 0, name=f"elastic.{name}")
                np.copyto(arrays[name], whole)
        saved, self._saved_state = self._saved_state, {n: v for n, v in self._saved_state.items() if n not in arrays}
        try:
            super().sync()
        finally:
            self._saved_state = {name: self._saved_state.get(name, value) for name, value in saved.items()}

    def _load(self, states: Mapping[str, Any]) -> None:
        others = {}
        for name, value in states.items():
            mine = getattr(self, name, None)
            if isinstance(mine, np.ndarray) and isinstance(value, np.ndarray) and mine.shape == value.shape:
                np.copyto(mine, value)
            else:
                others[name] = value
        super()._load(others)
