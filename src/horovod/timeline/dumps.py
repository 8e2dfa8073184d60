"""The flight recorder's files: one JSON file per rank, written at once and read together.

They go into a folder of the user's own; folders where others can write, such as /tmp, are refused.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from horovod.core.requests import Request
from horovod.files import open_folder, replace_file

__all__ = [
    "PATTERN",
    "SCRIPT_ENDED",
    "VERSION",
    "Dump",
    "Operation",
    "PendingOperation",
    "Wait",
    "check_folder",
    "read_folder",
    "write",
]

VERSION = 2
#: Reason of a dump that is written while the script ends.
SCRIPT_ENDED = "the script ended with an exception"
#: Names of the files.
PATTERN = "rank-*.json"


class Operation(msgspec.Struct, omit_defaults=True):
    """One operation of one rank; times are nanoseconds of the host's monotonic clock, 0 if it did not happen."""

    request: Request
    members: tuple[int, ...]  # the ranks of its process set, if that still existed
    submitted_ns: int  # when the rank submitted it
    waited_ns: int = 0  # when a thread began to wait for it
    sequence: int = 0  # its place in the log; 0 before its execution
    started_ns: int = 0  # when its execution began here
    ended_ns: int = 0  # when it was done here
    together: int = 0  # number of operations that were executed at once
    error: str | None = None  # why it failed, or None

    @property
    def is_in_flight(self) -> bool:
        """Whether it was not done when the dump was written."""
        return not self.ended_ns


class Wait(msgspec.Struct):
    """The operation in which the main thread waited, and whether it was being executed."""

    request: Request
    executing: bool


class PendingOperation(msgspec.Struct):
    """An operation that the coordinator waited for: ranks that have submitted it, and members that have not."""

    request: Request
    submitted: Sequence[int]
    missing: Sequence[int]


class Dump(msgspec.Struct):
    """The record of one rank."""

    version: int  # version of the format
    job: str  # name of the job, the same on all ranks
    rank: int
    size: int  # number of ranks
    host: str
    pid: int
    reason: str  # reason for the dump
    time_s: float  # time of the dump, in seconds since 1970
    clock_ns: int  # time of the dump, on the clock of the operations
    position: int  # number of entries of the log that the rank had executed or skipped
    failure: str  # why the rank took part no more, or empty
    wait: Wait | None  # the operation that the main thread waited for, or None
    stack: list[str]  # stack of the main thread
    threads: dict[str, list[str]]  # the stack of every thread
    pending: list[PendingOperation]  # the operations that the coordinator waited for; on rank 0 only
    operations: list[Operation]  # the last few thousand operations, in the order of their submission
    generation: int = 1  # counts the times that the ranks of the job have met, from 1

    @property
    def file_name(self) -> str:
        """Name of its file, which differs from those of earlier generations."""
        return f"rank-{self.rank}{f'-generation-{self.generation}' if self.generation > 1 else ''}.json"


def write(dump: Dump, folder: Path) -> Path:
    """Write a dump, in the place of an older one of the same rank and generation, and return the file.

    Raises:
        OSError: the dump cannot be written; see ``check_folder``.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(folder)
    path = folder / dump.file_name
    # This escapes what UTF-8 cannot hold, such as a file name in Latin-1 in the text of an exception.
    replace_file(path, json.dumps(msgspec.to_builtins(dump)).encode(), mode=0o600)
    return path


def check_folder(folder: Path) -> None:
    """Check that only this user can put or replace files in a folder.

    Raises:
        PermissionError: it belongs to another user, or others can write there, or a link of another user leads to it.
        OSError: it does not exist.
    """
    opened = open_folder(folder)
    try:
        status = os.fstat(opened)
    finally:
        os.close(opened)
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "other users can write there; name a folder of your own", str(folder))


def read_folder(folder: Path) -> tuple[list[Dump], list[str]]:
    """Return the dumps of the last job that wrote into a folder, by generation and rank, and a sentence for each file
    that was left out.
    """
    dumps: list[Dump] = []
    notes = []
    for path in sorted(folder.glob(PATTERN)):
        try:
            dump = msgspec.convert(json.loads(_read(path)), Dump)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            notes.append(f"{path.name} cannot be read: {error}")
            continue
        if dump.version != VERSION:
            notes.append(f"{path.name} is of version {dump.version}, this reads {VERSION}")
            continue
        dumps.append(dump)
    if dumps:
        last = max(dumps, key=lambda dump: dump.time_s)
        notes += [f"{dump.file_name} is of another, older job" for dump in dumps if dump.job != last.job]
        dumps = [dump for dump in dumps if dump.job == last.job]
    return sorted(dumps, key=lambda dump: (dump.generation, dump.rank)), notes


def _read(path: Path) -> bytes:
    """Read a plain file; refuse links, and do not wait for the writer of a pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        return file.read()
