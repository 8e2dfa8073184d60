"""What the packages of this distribution share: the version, and the guard that keeps them away from the real SDK."""

from __future__ import annotations

from khorovod_ipu._version import __version__

__all__ = ["__version__"]
