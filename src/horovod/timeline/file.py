"""A trace file that is complete JSON at every moment, even if this process is killed.

The file is one array whose end is far ahead, after blanks: ``[ event, event,            ]``. Events are written into
the blanks, each write within one page of the file: the kernel does it as a whole or not at all. When the blanks are
used up, a longer copy replaces the file; a very long file gets more blanks in its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from horovod.files import final_path, open_folder

__all__ = ["MOST_BYTES", "TraceFile"]

_PAGE = 4096
_FIRST_BYTES = 256 << 10
_COPY_BYTES = 1 << 20
#: A longer file is changed in its place, not copied; it then has no end, or two, between two system calls.
_CUT_BYTES = 64 << 20
#: The longest event that can be written.
MOST_BYTES = _PAGE - 2


class TraceFile:
    """Writes events; see the module. An existing file is replaced unless it ``goes_on``, and links of this user and
    root are followed. The first event has no line breaks.

    Raises:
        OSError: the file cannot be written.
        PermissionError: a part of the path is a symbolic link of another user.
    """

    def __init__(self, path: Path, first: bytes, goes_on: bool = False) -> None:
        self.path = final_path(path.absolute())
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "no regular file", str(path))
        self._position = self._length = 0
        self._fd = -1
        #: The beginning of an earlier recording, with its first event; empty if there is none.
        self.before = self._open() if goes_on else b""
        if self.before:
            self._make_room(_FIRST_BYTES)
        else:
            self._lengthen(_FIRST_BYTES, b"[\n" + first)

    def append(self, events: Iterable[bytes]) -> None:
        """Write events, each without line breaks and no longer than ``MOST_BYTES``; longer ones are left out.

        Raises:
            OSError: the disk is full.
        """
        pending = bytearray()
        for event in events:
            if len(event) > MOST_BYTES:
                continue
            used = self._position % _PAGE + len(pending)
            if used == 0 or used + 2 + len(event) > _PAGE:
                self._write(pending)
                pending = bytearray()
                # Leave the rest of the page blank.
                self._position = -(-self._position // _PAGE) * _PAGE
                self._make_room(self._length)
            pending += b",\n"
            pending += event
        self._write(pending)

    def finish(self) -> None:
        """Remove the blanks and close the file."""
        if self._fd < 0:
            return
        try:
            if self._position <= _CUT_BYTES:
                self._replace(self._position + 2, b"")
            else:
                os.ftruncate(self._fd, self._position)
                os.pwrite(self._fd, b"\n]", self._position)
        finally:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytearray) -> None:
        if data:
            os.pwrite(self._fd, data, self._position)
            self._position += len(data)

    def _make_room(self, by: int) -> None:
        """Lengthen the file unless there is another page."""
        if self._position + 2 * _PAGE > self._length:
            self._lengthen(by)

    def _open(self) -> bytes:
        """Open an earlier recording at its end, and return its first page; empty if there is none."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return b""
        begin, length = os.pread(fd, _PAGE, 0), _ink(fd, os.fstat(fd).st_size)
        if not begin.startswith(b"[") or os.pread(fd, 1, length - 1) != b"]":
            os.close(fd)
            return b""
        self._fd, self._length, self._position = fd, length, _ink(fd, length - 1)
        return begin

    def _lengthen(self, by: int, head: bytes = b"") -> None:
        if self._position > _CUT_BYTES:
            by = min(by, _CUT_BYTES)
            _blank(self._fd, self._length, self._length + by - 2)
            os.pwrite(self._fd, b"\n]", self._length + by - 2)
            os.pwrite(self._fd, b" ", self._length - 1)
            self._length += by
            return
        self._replace(self._position + len(head) + by, head)
        self._position += len(head)

    def _replace(self, length: int, head: bytes) -> None:
        """Replace this file by one of ``length`` bytes: the bytes so far, ``head``, blanks and the end."""
        # The copy gets a name only when it is complete: a process that is killed before leaves nothing behind.
        folder = open_folder(self.path.parent)
        fd = -1
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o666, dir_fd=folder)
            self._fill(fd, length, head)
            part = f".{self.path.name}.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            os.link(f"/proc/self/fd/{fd}", part, dst_dir_fd=folder, follow_symlinks=True)
            os.rename(part, self.path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        finally:
            os.close(folder)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._length = length

    def _fill(self, fd: int, length: int, head: bytes) -> None:
        at = 0
        while at < self._position:
            at += os.pwrite(fd, os.pread(self._fd, min(_COPY_BYTES, self._position - at), at), at)
        at += os.pwrite(fd, head, at)
        _blank(fd, at, length - 2)
        os.pwrite(fd, b"\n]", length - 2)


def _blank(fd: int, at: int, end: int) -> None:
    """Write blanks."""
    while at < end:
        at += os.pwrite(fd, b" " * min(_COPY_BYTES, end - at), at)


def _ink(fd: int, end: int) -> int:
    """Return where the blanks before ``end`` begin."""
    while end > 0:
        start = max(0, end - _COPY_BYTES)
        if found := os.pread(fd, end - start, start).rstrip():
            return start + len(found)
        end = start
    return 0
