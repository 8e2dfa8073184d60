"""Output files that are renamed when they are full, so that a job that prints for weeks does not fill the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from horovod.files import create_file, final_path, open_folder
from horovod.launch.plan import Rotation

__all__ = ["OutputFile"]


class OutputFile:
    """An unbuffered file. When it is full it becomes ``name.1``, and ``name.1`` becomes ``name.2``.

    A file ends with a whole line if a line ends within the data that still fits. Links of other users are not followed;
    an older file is emptied, and older backups are removed.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, rotation: Rotation) -> None:
        self.path, self._rotation = final_path(path), rotation
        self._nbytes = 0
        self._fd = create_file(self.path)
        if rotation.max_bytes:
            with self._folder() as folder:
                for number in range(1, rotation.backups + 1):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._name(number), dir_fd=folder)

    def write(self, data: bytes) -> None:
        """Append ``data``.

        Raises:
            OSError: the data cannot be written, or the next file cannot be created.
        """
        most = self._rotation.max_bytes
        while most and self._nbytes + len(data) > most:
            room = most - self._nbytes
            end = data.rfind(b"\n", 0, room) + 1
            if not end and not self._nbytes:
                end = most  # a line that is longer than a file
            self._append(data[:end])
            data = data[end:]
            self._rotate()
        self._append(data)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._nbytes += written
            view = view[written:]

    def _rotate(self) -> None:
        os.close(self._fd)
        self._fd, self._nbytes = -1, 0
        with self._folder() as folder:
            for number in range(self._rotation.backups, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self._name(number - 1), self._name(number), src_dir_fd=folder, dst_dir_fd=folder)
        self._fd = create_file(self.path)

    def _name(self, number: int) -> str:
        return f"{self.path.name}.{number}" if number else self.path.name

    @contextlib.contextmanager
    def _folder(self) -> Iterator[int]:
        folder = open_folder(self.path.parent)
        try:
            yield folder
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
