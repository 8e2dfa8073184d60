"""Old import path of the exceptions."""

from __future__ import annotations

from horovod.errors import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the text of ``HorovodVersionMismatchError``.

    Args:
        name: the part that differs.
        version: the version here.
        installed_version: the version there.

    Returns:
        One sentence.
    """
    return str(HorovodVersionMismatchError(name, version, installed_version))
