"""Credentials of MUNGE: Slurm clusters use them to prove to one host the user of a process on another host.

The interface is that of libmunge, munge(3), munge_ctx(3) and munge_enum(3): its daemon on each host knows the cluster's
key, and learns from the kernel the user of the process at the other end of its socket.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import NamedTuple

__all__ = ["Credential", "Munge", "MungeError"]

_UID_RESTRICTION = 9  # MUNGE_OPT_UID_RESTRICTION


class MungeError(Exception):
    """There is no MUNGE here, or it refused."""


class Credential(NamedTuple):
    """The content of a credential."""

    payload: bytes  # bytes that its creator put in
    uid: int  # user id of its creator, as MUNGE knows it


class Munge:
    """MUNGE on this host, for the user of this process.

    Raises:
        MungeError: the library is missing, or its daemon does not answer.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libmunge.so.2")
        except OSError:
            raise MungeError("there is no libmunge.so.2 on this host") from None
        self._library.munge_ctx_create.restype = ctypes.c_void_p
        self._library.munge_strerror.restype = ctypes.c_char_p
        self._free = ctypes.CDLL(None).free
        # This process's user, as MUNGE knows it; in a container it may be another number than here.
        self.uid = self.decode(self._encode(b"", None)).uid

    def encode(self, payload: bytes) -> bytes:
        """Return a credential that only processes of this user can read, each host once, for five minutes."""
        return self._encode(payload, self.uid)

    def decode(self, credential: bytes) -> Credential:
        """Read a credential that ``encode`` made on any host of the cluster.

        Raises:
            MungeError: it is not a credential, is for another user, is too old, or was read on this host before.
        """
        data, length = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        status = self._library.munge_decode(
            credential, None, ctypes.byref(data), ctypes.byref(length), ctypes.byref(uid), ctypes.byref(gid)
        )
        try:
            self._check(status)
            return Credential(ctypes.string_at(data, length.value) if data else b"", uid.value)
        finally:
            self._free(data)

    def _encode(self, payload: bytes, reader: int | None) -> bytes:
        context = ctypes.c_void_p(self._library.munge_ctx_create())
        made = ctypes.c_void_p()
        try:
            if reader is not None:
                self._check(self._library.munge_ctx_set(context, _UID_RESTRICTION, ctypes.c_uint32(reader)))
            self._check(self._library.munge_encode(ctypes.byref(made), context, payload, len(payload)))
            return ctypes.string_at(made)
        finally:
            self._free(made)
            self._library.munge_ctx_destroy(context)

    def _check(self, status: int) -> None:
        if status:
            raise MungeError(f"MUNGE: {self._library.munge_strerror(status).decode()}")
