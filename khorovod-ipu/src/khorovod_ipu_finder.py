"""Make ``tensorflow.python.ipu`` importable with a current TensorFlow.

``khorovod_ipu.pth`` imports this module whenever Python starts. It loads nothing: it appends one finder *after* all
others, for a single name. If a TensorFlow has its own ``ipu``, Python always finds that first.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would take longer than this whole module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["Finder", "install"]

NAME = "tensorflow.python.ipu"


class Finder:
    """Finds ``tensorflow.python.ipu``, and nothing else."""

    NAME = NAME

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of ``tensorflow.python.ipu``; None for other names."""
        if name != NAME:
            return None
        from importlib.machinery import PathFinder
        from pathlib import Path

        return PathFinder.find_spec(name, [str(Path(__file__).parent / "khorovod_ipu" / "tensorflow_python")])


def install() -> None:
    """Append the finder after all others, once."""
    if not any(getattr(finder, "NAME", None) == NAME for finder in sys.meta_path):
        sys.meta_path.append(_finder)


_finder = Finder()
install()
