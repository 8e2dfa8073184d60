"""The collectives on NumPy arrays, over the memory of a session's streams."""

from __future__ import annotations

from horovod.bindings.collectives import Collectives
from horovod.bindings.numpy_adapter import NumpyAdapter

__all__ = ["comm"]

comm = Collectives(NumpyAdapter())
