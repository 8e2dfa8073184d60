"""Makes ``tensorflow.python.ipu`` importable beside a TensorFlow of today.

``khorovod_ipu.pth`` imports this module whenever Python starts. It loads nothing: it puts one finder *behind* all
others, which answers for one name. Where a TensorFlow has an ``ipu`` of its own, that is found first, always.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing itself would take longer to load than all of this
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
        """Return where the package is, if it is this one that is sought."""
        if name != NAME:
            return None
        from importlib.machinery import PathFinder
        from pathlib import Path

        return PathFinder.find_spec(name, [str(Path(__file__).parent / "khorovod_ipu" / "tensorflow_python")])


def install() -> None:
    """Put the finder behind all others; once."""
    if not any(getattr(finder, "NAME", None) == NAME for finder in sys.meta_path):
        sys.meta_path.append(_finder)


_finder = Finder()
install()
