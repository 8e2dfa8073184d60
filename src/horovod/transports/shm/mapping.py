"""Memory that all ranks of the host have mapped, and the copy of it that forked children of a rank see.

Nothing stays shared with a forked child: a child that wrote to the memory of its parent would change the data of all
ranks, and a checkpoint written by a child would change while the parent trains. So the parent copies its live
tensors before the fork, and the child has the copies in the place of the tensors. All other memory becomes empty
memory of the child, in the same place, so that objects over it can be destroyed as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from typing import Any

from horovod.errors import InitError
from horovod.syscalls import memory_file

__all__ = ["address_of", "create_memfd", "map_shared", "populate", "unmap"]

_PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x02, 0x10, 0x20, 0x4000
_MAY_MOVE_TO = 3
_READ, _READ_WRITE = 1, 3
#: An advice of madvise(2) since Linux 5.14; Python has no name for it.
_POPULATE_WRITE = 23
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
        fd = memory_file(name)
        os.ftruncate(fd, nbytes)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise _refused(f"create {nbytes} bytes of shared memory", error) from None
    return fd


def map_shared(fd: int, nbytes: int, offset: int = 0, live: dict[int, int] | None = None) -> mmap.mmap:
    """Map a memfd, which stays the caller's, for this process, and for no child that it forks. Of the bytes in
    ``live``, length by start, a multiple of the page size, a child gets a copy; the caller changes it as tensors come
    and go.

    Raises:
        InitError: the system refuses.
    """
    try:
        memory = mmap.mmap(fd, nbytes, offset=offset)
    except OSError as error:
        raise _refused(f"map {nbytes} bytes of shared memory", error) from None
    _mapped[:] = [known for known in _mapped if known.is_there()]
    _mapped.append(_Mapping(memory, nbytes, {} if live is None else live))
    return memory


def unmap(memory: mmap.mmap) -> None:
    """Unmap memory; if tensors still lie in it, the end of the last one unmaps it."""
    with contextlib.suppress(BufferError):
        memory.close()


def populate(address: int, nbytes: int) -> None:
    """Clear memory that was never touched: all pages at once cost less than one fault for each of them."""
    if _madvise is not None:
        # A kernel that does not support this leaves it to the faults.
        _madvise(address, nbytes, _POPULATE_WRITE)


def address_of(memory: mmap.mmap) -> int:
    """Return where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Mapping:
    """A mapping of this process; see ``map_shared``."""

    def __init__(self, memory: mmap.mmap, nbytes: int, live: dict[int, int]) -> None:
        self._memory = weakref.ref(memory)
        self._address, self._nbytes, self._live = address_of(memory), nbytes, live
        # Per forking thread: (offset, address of the copy, bytes); nothing if there was no memory for them.
        self._copies: dict[int, list[tuple[int, int, int]]] = {}

    def is_there(self) -> bool:
        memory = self._memory()
        return memory is not None and not memory.closed

    def copy(self) -> None:
        """Copy the live tensors, for the child that the calling thread is about to fork."""
        copies: list[tuple[int, int, int]] = []
        self._copies[threading.get_ident()] = copies
        for start, nbytes in list(self._live.items()):
            size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            copy = _mmap(None, size, _READ_WRITE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
            if copy in (None, _FAILED):
                self.end_fork()
                return
            _memmove(copy, self._address + start, size)
            copies.append((start, copy, size))

    def end_fork(self) -> None:
        """Free the copies, in the parent."""
        for _, copy, size in self._copies.pop(threading.get_ident(), ()):
            _munmap(copy, size)

    def leave_to_parent(self) -> None:
        """Replace the mapping by private memory of this child, with the copies in it."""
        copies = self._copies.get(threading.get_ident())
        if copies is None:
            # No memory for the copies: leave the pages readable only.
            _mprotect(self._address, self._nbytes, _READ)
            return
        flags = _PRIVATE | _ANONYMOUS | _FIXED | _NORESERVE
        _mmap(self._address, self._nbytes, _READ_WRITE, flags, -1, 0)
        for start, copy, size in copies:
            _mremap(copy, size, size, _MAY_MOVE_TO, self._address + start)


_mapped: list[_Mapping] = []


def _before_fork() -> None:
    for mapping in list(_mapped):
        if mapping.is_there():
            mapping.copy()


def _after_fork_in_parent() -> None:
    for mapping in list(_mapped):
        mapping.end_fork()


def _after_fork_in_child() -> None:
    for mapping in _mapped:
        if mapping.is_there():
            mapping.leave_to_parent()
    # This child's memory is private now, so its own children need no copies.
    _mapped.clear()


def _refused(what: str, error: Exception) -> InitError:
    number = getattr(error, "errno", errno.EOVERFLOW)
    return InitError(f"hvd.init() cannot {what}: {_HINTS.get(number, error)}")


def _function(name: str, *arguments: Any, library: type[ctypes.CDLL] = ctypes.PyDLL) -> Any:
    try:
        function = getattr(library(None), name)
    except (AttributeError, OSError):  # this is not Linux, so there is only one rank
        return None
    function.argtypes, function.restype = arguments, ctypes.c_void_p
    return function


_size = ctypes.c_size_t
_mmap = _function("mmap", ctypes.c_void_p, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _function("munmap", ctypes.c_void_p, _size)
_mremap = _function("mremap", ctypes.c_void_p, _size, _size, ctypes.c_int, ctypes.c_void_p)
_mprotect = _function("mprotect", ctypes.c_void_p, _size, ctypes.c_int)
# madvise takes long, so it releases the interpreter.
_madvise = _function("madvise", ctypes.c_void_p, _size, ctypes.c_int, library=ctypes.CDLL)
# This call keeps the interpreter: no other Python thread begins to write meanwhile.
_memmove = _function("memmove", ctypes.c_void_p, ctypes.c_void_p, _size)
_FAILED = ctypes.c_void_p(-1).value

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
