"""Memory that all ranks of the host have mapped, and what forked children of a rank see of it.

A child that wrote to the memory of its parent would change what all ranks compute with; so nothing stays shared with
a child. Of the memory in which tensors lie it gets a copy, made page by page when it writes; of everything else
nothing at all, in the same place, so that what was made over it can be taken apart as before. A tensor that the user
does not know to be shared is detached before a fork: from then on neither changes what the other sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

from horovod.errors import InitError

__all__ = ["address_of", "attach", "create_memfd", "detach", "map_shared", "populate", "unmap"]

_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAY_MOVE_TO = 3
_KEEP_SIZE_AND_PUNCH_HOLE = 3
_READ, _READ_WRITE = 1, 3
#: Of madvise(2), since Linux 5.14; Python has no name for it.
_POPULATE_WRITE = 23
#: How much is copied at once when it is detached, so that little is there twice.
_PIECE_BYTES = 1 << 20
_HINTS = {
    errno.EMFILE: "this process has too many files open; raise `ulimit -n`, or close some before hvd.init()",
    errno.ENFILE: "this machine has too many files open",
    errno.ENOMEM: "there is no room for it in this process; raise `ulimit -v`, or set HOROVOD_ARENA_BYTES to less",
    errno.EFBIG: "it is larger than a file may be here; raise `ulimit -f`, or set HOROVOD_ARENA_BYTES to less",
    errno.ENOSPC: "this machine has no memory left for it; set HOROVOD_ARENA_BYTES to less",
    errno.EOVERFLOW: "no file can be as large; set HOROVOD_ARENA_BYTES to less",
}
_HINTS[errno.EINVAL] = _HINTS[errno.EOVERFLOW]


def create_memfd(name: str, nbytes: int) -> int:
    """Return an anonymous file of ``nbytes``, sparse; nothing of it survives its last user.

    Raises:
        InitError: the system refuses.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise _refused(f"create {nbytes} bytes of shared memory", error) from None
    return fd


def map_shared(fd: int, nbytes: int, offset: int = 0, has_tensors: bool = False) -> mmap.mmap:
    """Map a memfd for this process, and for no child that it forks.

    Args:
        fd: stays the caller's.
        nbytes: how much of it.
        offset: where that begins.
        has_tensors: whether children keep what they have of it, as a copy of their own.

    Raises:
        InitError: the system refuses.
    """
    try:
        memory = mmap.mmap(fd, nbytes, offset=offset)
        keeper = os.dup(fd) if has_tensors else -1
    except OSError as error:
        raise _refused(f"map {nbytes} bytes of shared memory", error) from None
    _mapped[:] = [known for known in _mapped if known.is_there()]
    place = _Place(memory, nbytes, offset, keeper)
    _mapped.append(place)
    weakref.finalize(memory, place.close).atexit = False
    return memory


def unmap(memory: mmap.mmap) -> None:
    """Give a mapping back; while there are tensors in it, that happens with the last one."""
    with contextlib.suppress(BufferError):
        memory.close()
        for place in [known for known in _mapped if not known.is_there()]:
            place.close()


def detach(memory: mmap.mmap, start: int, nbytes: int) -> bool:
    """Turn a stretch of a mapping with tensors into memory of this process alone, with what is in it.

    Args:
        memory: of ``map_shared``.
        start: a multiple of the page size.
        nbytes: another one; nobody writes there meanwhile.

    Returns:
        Whether all of it is this process's own now.
    """
    place = _find(memory)
    return place is not None and place.detach(start, nbytes)


def attach(memory: mmap.mmap, start: int, nbytes: int) -> bool:
    """Undo ``detach``; what was in it is lost. Return False where that cannot be done."""
    place = _find(memory)
    return place is not None and place.attach(start, nbytes)


def populate(address: int, nbytes: int) -> None:
    """Have memory cleared that nobody has touched yet; all pages at once cost less than one fault for each of them."""
    if _madvise is not None:
        # A kernel that does not know how leaves it to the faults.
        _madvise(address, nbytes, _POPULATE_WRITE)


def _find(memory: mmap.mmap) -> _Place | None:
    return next((place for place in _mapped if place.is_of(memory)), None)


def address_of(memory: mmap.mmap) -> int:
    """Return where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Place:
    """A mapping of this process; ``fd`` is a descriptor of its own, or -1 if children get nothing."""

    def __init__(self, memory: mmap.mmap, nbytes: int, offset: int, fd: int) -> None:
        self._memory = weakref.ref(memory)
        self._address = address_of(memory)
        self._nbytes, self._offset, self._fd = nbytes, offset, fd
        self._file = os.fstat(fd)[1:3] if fd >= 0 else None
        self._owner = os.getpid()
        self._detached: dict[int, int] = {}

    def is_of(self, memory: mmap.mmap) -> bool:
        return self._memory() is memory and not memory.closed

    def detach(self, start: int, nbytes: int) -> bool:
        for low in range(start, start + nbytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, start + nbytes - low)
            fresh = _mmap(None, size, _READ_WRITE, _PRIVATE | _ANONYMOUS, -1, 0)
            if fresh in (None, _FAILED):
                return False
            _memmove(fresh, self._address + low, size)
            if _mremap(fresh, size, size, _MAY_MOVE_TO, self._address + low) != self._address + low:
                _munmap(fresh, size)
                return False
            self._detached[low] = size
            if self._is_file(self._fd):
                _fallocate(self._fd, _KEEP_SIZE_AND_PUNCH_HOLE, self._offset + low, size)
        return True

    def attach(self, start: int, nbytes: int) -> bool:
        there = self._address + start
        if not self._is_file(self._fd) or not _map(there, nbytes, _SHARED, self._fd, self._offset + start):
            return False
        for low in range(start, start + nbytes, _PIECE_BYTES):
            self._detached.pop(low, None)
        return True

    def is_there(self) -> bool:
        memory = self._memory()
        return memory is not None and not memory.closed

    def leave_to_parent(self) -> None:
        """Put memory of this child's own in its place."""
        is_file, low = self._is_file(self._fd), 0
        for start, nbytes in [*sorted(self._detached.items()), (self._nbytes, 0)]:
            there, length = self._address + low, start - low
            if length and self._fd < 0:
                _map(there, length, _PRIVATE | _ANONYMOUS, -1, 0)
            elif length and not (is_file and _map(there, length, _PRIVATE, self._fd, self._offset + low)):
                # To read it does no harm.
                _mprotect(there, length, _READ)
            low = start + nbytes
        self._owner = os.getpid()
        self.close()

    def close(self) -> None:
        """Close the descriptor, unless this is a child that has not noticed."""
        fd, self._fd = self._fd, -1
        if fd >= 0 and os.getpid() == self._owner and self._is_file(fd):
            os.close(fd)

    def _is_file(self, fd: int) -> bool:
        # The script may have closed all descriptors that it does not know.
        try:
            return os.fstat(fd)[1:3] == self._file
        except OSError:
            return False


def _map(address: int, nbytes: int, flags: int, fd: int, offset: int) -> bool:
    flags |= _FIXED | _NORESERVE
    return bool(_mmap(address, nbytes, _READ_WRITE, flags, fd, offset) == address)


_mapped: list[_Place] = []


def _after_fork() -> None:
    """Keep this child's hands off its parent's memory."""
    for place in _mapped:
        if place.is_there():
            place.leave_to_parent()
    # A child of this child copies what is private already.
    _mapped.clear()


def _refused(what: str, error: Exception) -> InitError:
    number = getattr(error, "errno", errno.EOVERFLOW)
    return InitError(f"hvd.init() cannot {what}: {_HINTS.get(number, error)}")


def _function(name: str, *arguments: Any, library: type[ctypes.CDLL] = ctypes.PyDLL) -> Any:
    try:
        function = getattr(library(None), name)
    except (AttributeError, OSError):  # no Linux, where there is only one rank
        return None
    function.argtypes, function.restype = arguments, ctypes.c_void_p
    return function


_size = ctypes.c_size_t
_mmap = _function("mmap", ctypes.c_void_p, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _function("munmap", ctypes.c_void_p, _size)
_mremap = _function("mremap", ctypes.c_void_p, _size, _size, ctypes.c_int, ctypes.c_void_p)
_mprotect = _function("mprotect", ctypes.c_void_p, _size, ctypes.c_int)
_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
# It takes long, so others may have the interpreter.
_madvise = _function("madvise", ctypes.c_void_p, _size, ctypes.c_int, library=ctypes.CDLL)
# No other thread of Python's begins to write meanwhile, as it could if this gave the interpreter away.
_memmove = _function("memmove", ctypes.c_void_p, ctypes.c_void_p, _size)
_FAILED = ctypes.c_void_p(-1).value

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
