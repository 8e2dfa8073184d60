"""The text of ``poprun --version``."""

from __future__ import annotations

import json
import platform
from importlib import metadata

from khorovod_ipu import __version__

__all__ = ["version_text"]

_DEPENDENCIES = ("khorovod", "torch", "numpy", "onnx", "tensorflow", "tensorflow-cpu")


def version_text(form: str) -> str:
    """Return the version and the platform.

    Args:
        form: "text", "full-text" or "full-json".
    """
    versions = {"poprun": __version__, "python": platform.python_version()}
    for name in _DEPENDENCIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if form == "full-json":
        return json.dumps(versions, indent=2)
    if form == "full-text":
        return "\n".join(f"{name} {version}" for name, version in versions.items())
    return f"poprun {__version__} (khorovod-ipu, over khorovod {versions['khorovod']}: PopRun in software)"
