"""Old import path of functions that need no framework."""

from __future__ import annotations

from horovod.bindings.basics import HorovodBasics

__all__ = ["HorovodBasics"]
