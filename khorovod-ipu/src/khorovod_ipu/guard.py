"""Refuse to mix these packages with the vendor's SDK.

Each package calls ``refuse_beside_the_sdk()`` first. If the SDK comes first on ``sys.path``, Python imports the SDK's
own packages and none of our code runs; only a mixture of both is refused.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["found_sdk", "refuse_beside_the_sdk"]

#: Import packages of the SDK; packages that exist only in the SDK reveal it, too.
SDK_PACKAGES = ("popart", "poptorch", "popdist", "popxl", "popart_core", "poptorch_core", "popdist_core")
#: Distribution names of the SDK's wheels, which pip installs to the same folders.
SDK_DISTRIBUTIONS = ("popart", "poptorch", "popdist", "popxl")

_OURS = Path(__file__).resolve().parent


def _is_ours(folder: Path) -> bool:
    """Return whether a folder of packages is ours, or another copy of ours, as in a checkout."""
    return (folder / _OURS.name / Path(__file__).name).exists()


def found_sdk(search: list[str] | None = None) -> str:
    """Return a file of the SDK's packages, or the name of its wheel; empty if the SDK is not installed.

    Args:
        search: folders to search; ``None`` means ``sys.path`` and its installed distributions.
    """
    for folder in sys.path if search is None else search:
        for name in SDK_PACKAGES:
            spec = PathFinder.find_spec(name, [folder])
            # A folder without __init__.py is not a package: the tests of a project may be called `popart`.
            if spec and spec.origin and not _is_ours(Path(spec.origin).resolve().parent.parent):
                return spec.origin
    for name in SDK_DISTRIBUTIONS if search is None else ():
        try:
            return f"the installed distribution {name} {metadata.distribution(name).version}"
        except metadata.PackageNotFoundError:
            continue
    return ""


@cache
def refuse_beside_the_sdk() -> None:
    """Raise if the vendor's SDK can be imported, too.

    Raises:
        ImportError: the SDK can be imported; the message names its path and the remedy.
    """
    if place := found_sdk():
        raise ImportError(
            "khorovod-ipu imitates Graphcore's SDK in software, and the SDK itself is here, too: "
            f"{place}. Not both in one process: for real devices `pip uninstall khorovod-ipu`; for the software device "
            "use an environment without the SDK (do not source its enable.sh, take it out of PYTHONPATH)."
        )
