"""The flight recorder's files: one JSON file per rank, written at once and read together.

They go into a folder of the user's own. Where others can write, too, as in /tmp, they go into a subfolder that only
this user can enter; a link, or another user's folder, of its name is refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import msgspec

from horovod.phrases import printable

__all__ = [
    "PATTERN",
    "SCRIPT_ENDED",
    "VERSION",
    "Dump",
    "Operation",
    "PendingOperation",
    "Wait",
    "read_folder",
    "write",
]

VERSION = 1
#: Reason of a dump that is written while the script ends.
SCRIPT_ENDED = "the script ended with an exception"
#: Names of the files.
PATTERN = "rank-*.json"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Operation(msgspec.Struct, omit_defaults=True):
    """One operation of one rank; times are nanoseconds of the host's monotonic clock, 0 if it did not happen.

    Attributes:
        kind: the collective, in lower case.
        name: the key of the match, or empty.
        process_set: id of its process set.
        members: the ranks of the process set, if it still existed.
        bytes: bytes of this rank's tensors.
        dtype: dtype of the first tensor.
        shapes: shapes of all tensors.
        site: the user's line.
        sequence: its place in the log; 0 before its execution.
        submitted_ns: when the rank submitted it.
        waited_ns: when a thread began to wait for it.
        started_ns: when its execution began here.
        ended_ns: when it was done here.
        together: number of operations that were executed at once.
        error: why it failed, or empty.
    """

    kind: str
    name: str
    process_set: int
    members: list[int]
    bytes: int
    dtype: str
    shapes: list[list[int]]
    site: str
    sequence: int
    submitted_ns: int
    waited_ns: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    together: int = 0
    error: str = ""

    @property
    def is_in_flight(self) -> bool:
        """Whether it was not done when the dump was written."""
        return not self.ended_ns


class Wait(msgspec.Struct):
    """The operation in which the main thread waited; see ``Operation``."""

    kind: str
    name: str
    process_set: int
    site: str
    executing: bool


class PendingOperation(msgspec.Struct):
    """An operation that the coordinator waited for: ranks that have submitted it, and members that have not."""

    kind: str
    name: str
    process_set: int
    site: str
    submitted: list[int]
    missing: list[int]


class Dump(msgspec.Struct):
    """The record of one rank.

    Attributes:
        version: version of the format.
        job: name of the job, the same on all ranks.
        rank: the rank.
        size: number of ranks.
        host: name of its host.
        pid: its process id.
        reason: reason for the dump.
        time_s: time of the dump, in seconds since 1970.
        clock_ns: time of the dump, on the clock of the operations.
        position: number of entries of the log that the rank had executed or skipped.
        failure: why the rank took part no more, or empty.
        process_sets: the ranks of each process set.
        wait: the operation that the main thread waited for, or None.
        stack: stack of the main thread.
        threads: the stack of every thread.
        pending: the operations that the coordinator waited for; on rank 0 only.
        operations: the last few thousand operations, in the order of their submission.
        generation: counts the times that the ranks of the job have met, from 1.
    """

    version: int
    job: str
    rank: int
    size: int
    host: str
    pid: int
    reason: str
    time_s: float
    clock_ns: int
    position: int
    failure: str
    process_sets: dict[int, list[int]]
    wait: Wait | None
    stack: list[str]
    threads: dict[str, list[str]]
    pending: list[PendingOperation]
    operations: list[Operation]
    generation: int = 1

    @property
    def file_name(self) -> str:
        """Name of its file, which differs from those of earlier generations."""
        return f"rank-{self.rank}{f'-generation-{self.generation}' if self.generation > 1 else ''}.json"


def write(dump: Dump, folder: Path) -> Path:
    """Write a dump, in the place of an older one of the same rank and generation.

    Args:
        dump: the dump.
        folder: its folder; made if it does not exist. If others can write there, a subfolder is used.

    Returns:
        The file.

    Raises:
        OSError: the dump cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder_fd, folder = _own_folder(folder)
    try:
        name = dump.file_name
        # A signal may interrupt another dump of this process, and other users must not know the name before.
        part = f".rank-{dump.rank}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(part, flags, 0o600, dir_fd=folder_fd), "wb") as file:
            try:
                file.write(msgspec.json.format(_encoded(dump), indent=1))
                file.flush()
                # Replaces any file of this name, even a link.
                os.replace(part, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder_fd)
                raise
        return folder / name
    finally:
        os.close(folder_fd)


def _encoded(dump: Dump) -> bytes:
    try:
        return msgspec.json.encode(dump)
    except UnicodeEncodeError:  # such as an exception with a file name in Latin-1
        return msgspec.json.encode(_printable(msgspec.to_builtins(dump)))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(part) for part in value]
    return {_printable(k): _printable(v) for k, v in value.items()} if isinstance(value, dict) else value


def _own_folder(folder: Path) -> tuple[int, Path]:
    """Open a folder in which only this user can put or replace files: this one, or a private one inside of it.

    Returns:
        Its descriptor, and its path.

    Raises:
        OSError: a file or folder of another user has its name.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{folder} is a link that another user has made")
    outer = os.open(folder, _OPEN_FOLDER)
    status = os.fstat(outer)
    if status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH:
        return outer, folder
    try:
        name = _private_name()
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=outer)
        inner = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=outer)
        status = os.fstat(inner)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            os.close(inner)
            raise PermissionError(f"{folder / name} must belong to this user alone, with the mode 0700")
        return inner, folder / name
    finally:
        os.close(outer)


def _private_name() -> str:
    return f"user-{os.geteuid()}"


def read_folder(folder: Path) -> tuple[list[Dump], list[str]]:
    """Read the dumps of the last job that wrote into a folder.

    Returns:
        The dumps by generation and rank, and a sentence for each file that was left out.
    """
    dumps: list[Dump] = []
    notes = []
    for path in _files(folder):
        try:
            dump = msgspec.json.decode(_read(path), type=Dump)
        except (OSError, msgspec.MsgspecError) as error:
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


def _files(folder: Path) -> list[Path]:
    """Return the dumps of a folder; if others can write there, this user's dumps, if there are any."""
    own = sorted((folder / _private_name()).glob(PATTERN))
    return own or sorted(folder.glob(PATTERN))


def _read(path: Path) -> bytes:
    """Read a plain file; refuse links, and do not wait for the writer of a pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no plain file")
        return file.read()
