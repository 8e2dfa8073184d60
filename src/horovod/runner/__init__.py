"""Old import path of ``horovod.run``."""

from __future__ import annotations

from horovod.launch.run import run

__all__ = ["run"]
