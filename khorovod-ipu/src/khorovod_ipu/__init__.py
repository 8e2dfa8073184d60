"""Shared parts of this distribution: the version, and the guard against mixing with the real SDK."""

from khorovod_ipu._version import __version__

__all__ = ["__version__"]
