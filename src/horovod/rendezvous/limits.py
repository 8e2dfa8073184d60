"""Error texts for a system that refuses a file or a socket: they name the setting to change."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from horovod.errors import InitError

__all__ = ["OUT_OF_FILES", "explained", "too_many_files"]

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors of a lack of descriptors: in this process, or on this machine."""


def too_many_files(size: int) -> str:
    """Return the error text for a rank of a job of ``size`` ranks that has no descriptor left."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"a rank may not open more than {limit} files at once, and init() of {size} ranks needs up to {3 * size + 16} "
        f"besides its own; raise the limit before the job starts: ulimit -n {max(4096, 2 * limit)}"
    )


@contextlib.contextmanager
def explained(size: int) -> Iterator[None]:
    """Turn a refusal by the system into an error that names the limit.

    Raises:
        InitError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise InitError(too_many_files(size)) from None
        raise InitError(f"the ranks of this host cannot meet: {error}") from error
