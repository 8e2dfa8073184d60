"""The matrix that ``horovodrun --check-build`` prints. Imports no framework."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from horovod._version import __version__

__all__ = ["check_build"]

# Title, the module and distribution that a user installs, and our part that speaks to it, if there is one.
_FRAMEWORKS = (
    ("TensorFlow", "tensorflow", ""),
    ("PyTorch", "torch", "horovod.torch"),
    ("JAX", "jax", ""),
    ("NumPy", "numpy", "horovod.numpy"),
)
_CONTROLLERS = (("shared memory", "horovod.transports.shm"), ("MPI", ""), ("Gloo", ""))
_OPERATIONS = (("shared memory", "horovod.transports.shm"), ("NCCL", ""), ("MPI", ""), ("Gloo", ""))


def check_build() -> str:
    """What of Horovod this installation offers, in Horovod's layout."""
    return "\n".join(
        [
            f"Horovod v{__version__} (khorovod):",
            "",
            "Available Frameworks:",
            *(_framework(*row) for row in _FRAMEWORKS),
            "",
            "Available Controllers:",
            *(_line(title, _exists(part)) for title, part in _CONTROLLERS),
            "",
            "Available Tensor Operations:",
            *(_line(title, _exists(part)) for title, part in _OPERATIONS),
        ]
    )


def _framework(title: str, name: str, part: str) -> str:
    there = _exists(name) and _exists(part)
    try:
        version = metadata.version(name) if there else ""
    except metadata.PackageNotFoundError:
        version = ""
    return _line(f"{title} {version}".rstrip(), there)


def _line(title: str, there: bool) -> str:
    return f"    [{'X' if there else ' '}] {title}"


def _exists(module: str) -> bool:
    try:
        return bool(module) and find_spec(module) is not None
    except (ImportError, ValueError):
        return False
