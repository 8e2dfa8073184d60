"""Old import path of functions that need no framework."""

from horovod.bindings.basics import HorovodBasics

__all__ = ["HorovodBasics"]
