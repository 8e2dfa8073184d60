"""Old import path of ``horovod.run``."""

from horovod.launch.run import run

__all__ = ["run"]
