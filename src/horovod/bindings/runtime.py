"""The only ``Collectives`` of numpy arrays in this process; code that all frameworks share uses it, too."""

from horovod.bindings.collectives import Collectives
from horovod.bindings.numpy_adapter import NumpyAdapter

__all__ = ["comm"]

comm = Collectives(NumpyAdapter())
