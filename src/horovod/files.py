"""Opens folders without following symbolic links of other users, for files whose names other users may know."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path

__all__ = ["claimed", "create_file", "final_path", "open_folder", "read_all", "replace_file"]

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40


def open_folder(path: Path) -> int:
    """Return a descriptor of a folder, created if needed; follow only links that this user or root has made.

    Raises:
        PermissionError: a part of the path is a symbolic link of another user.
        OSError: the folder can be neither opened nor created.
    """
    parts, links = deque(Path.cwd().joinpath(path).parts), 0
    folder = os.open(parts.popleft(), _FOLDER)
    try:
        while parts:
            name = parts.popleft()
            try:
                inner = os.open(name, _FOLDER, dir_fd=folder)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.mkdir(name, dir_fd=folder)
                parts.appendleft(name)
                continue
            except NotADirectoryError:
                target, links = _link(name, folder), links + 1
                if not target or links > _MOST_LINKS:
                    raise
                parts.extendleft(reversed(Path(target).parts))
                inner = os.open("/" if target.startswith("/") else ".", _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
    except BaseException as error:
        os.close(folder)
        if isinstance(error, OSError):
            raise _of(path, error) from None
        raise
    return folder


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Return a context in which nobody else on this machine can claim a folder, which is created if needed.

    Raises:
        BlockingIOError: another process, or another context, has claimed it.
        OSError: the folder cannot be opened or created, or its file system, such as NFS, cannot lock folders.
    """
    place = open_folder(path)
    try:
        folder = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(folder)


def final_path(path: Path) -> Path:
    """Return the path of a file after its links; follow only links of this user or root.

    Raises:
        PermissionError: one of the links belongs to another user.
    """
    for _ in range(_MOST_LINKS):
        folder = open_folder(path.parent)
        try:
            target = _link(path.name, folder)
        finally:
            os.close(folder)
        if not target:
            return path
        path = path.parent / target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def create_file(path: Path) -> int:
    """Return a descriptor of a file for writing, created with its folder if needed; an older file is emptied.

    Raises:
        PermissionError: its folder belongs to another user, or a part of the path is a symbolic link of another user.
        OSError: the file cannot be created.
    """
    path = final_path(path)
    folder = open_folder(path.parent)
    try:
        owner = os.fstat(folder).st_uid
        if owner not in (0, os.geteuid()):
            raise PermissionError(
                errno.EPERM, f"the folder belongs to another user (uid {owner}), who could redirect the file", str(path)
            )
        # Without O_NONBLOCK, opening a pipe that nobody reads would wait for ever.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path.name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        raise _of(path, error) from None
    finally:
        os.close(folder)
    os.set_blocking(fd, True)
    return fd


def replace_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file by one with ``data``, so that readers see the old or the new file, and never a part. Links of this
    user and root are followed.

    Raises:
        PermissionError: a part of the path is a symbolic link of another user.
        OSError: the file cannot be written.
    """
    path = final_path(path)
    folder, part = open_folder(path.parent), f".{path.name}.{secrets.token_hex(8)}"
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            raise
    except OSError as error:
        raise _of(path, error) from None
    finally:
        os.close(folder)


def read_all(fd: int) -> bytes:
    """Return all bytes of a file without use of its position, which other processes share."""
    size = os.fstat(fd).st_size
    parts = bytearray()
    while len(parts) < size and (part := os.pread(fd, size - len(parts), len(parts))):
        parts += part
    return bytes(parts)


def _of(path: Path, error: OSError) -> OSError:
    """Return an error of a part of a path as an error of the path."""
    return OSError(error.errno, error.strerror, str(path))


def _link(name: str, folder: int) -> str:
    """Return the target of a symbolic link of this user or root; empty when there is no link of this name."""
    try:
        link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return ""
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            return ""
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                errno.EPERM, f"{name!r} is a symbolic link of another user (uid {status.st_uid}); remove it"
            )
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)
