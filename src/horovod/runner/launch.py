"""Old import path of the command: ``python -m horovod.runner.launch`` is ``horovodrun``."""

from __future__ import annotations

import sys

from horovod.launch.cli import main

__all__ = ["run_commandline"]


def run_commandline() -> None:
    """Run ``horovodrun`` with this process's arguments, and end with its exit code."""
    sys.exit(main())


if __name__ == "__main__":
    run_commandline()
