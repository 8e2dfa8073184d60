"""The engine between hosts, as protocols: groups of ranks that exchange bytes.

An engine only moves bytes; ``hierarchical`` interprets and reduces them. So each engine serves every dtype and every
reduction, and all ranks get the same bits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from horovod.errors import HorovodInternalError
from horovod.transports.base import Watch

__all__ = ["Bytes", "Group", "Groups", "Pending", "Store", "failed", "wait_until"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Seconds between two checks of the awaited ranks; and between two looks for an alarm that requires a check at once.
SLICE_S, _LOOK_S = 0.1, 0.02
#: Seconds that may pass until a rank whose connection broke is known as lost.
_GRACE_S = 3.0


class Store(Protocol):
    """A table that all ranks read and write.

    Attributes:
        endpoint: the address at which it was reached.
    """

    endpoint: str

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value``, for all ranks."""

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value of ``key``, as soon as some rank has set it."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""

    def check(self, key: str) -> bool:
        """Return whether ``key`` has a value."""

    def delete(self, key: str) -> bool:
        """Forget ``key``; return whether it had a value."""

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Block until all ``keys`` have values."""

    def close(self) -> None:
        """Close the connection; a thread that waits here gets a ConnectionError."""


class Pending(Protocol):
    """An operation of a group that is under way."""

    def wait(self) -> None:
        """Block until it is over.

        Raises:
            PeerLostError: a rank of the group died meanwhile.
            StallError: a rank did not go on within the timeout.
            HorovodInternalError: the engine failed.
        """


class Group(Protocol):
    """Ranks that all call the same operations in the same order. Memory of an operation is in use until it is over.

    Attributes:
        ranks: global ranks, in their order in the group.
        me: this rank's place among them.
    """

    ranks: tuple[int, ...]
    me: int

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], receive: Bytes, receive_counts: Sequence[int]
    ) -> Pending:
        """Begin to send the i-th part of ``send`` to the i-th rank, and to receive its part for this one."""

    def gather(self, part: Bytes, receive: Bytes, counts: Sequence[int]) -> Pending:
        """Begin to concatenate all ranks' parts, whose lengths are ``counts``, on all of them."""

    def broadcast(self, data: Bytes, root: int) -> Pending:
        """Begin to copy the data of the rank at place ``root`` to all others."""


class Groups(Protocol):
    """An engine between hosts.

    Attributes:
        name: name of the engine.
    """

    name: str

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of some ranks; all of them first ask for it at the same point of the log."""

    def close(self) -> None:
        """End all groups."""


def wait_until(is_over: Callable[[float], bool], ranks: Sequence[int], watch: Watch) -> None:
    """Block until an operation is over.

    Args:
        is_over: waits for the operation for the given seconds at most; returns whether it is over.
        ranks: the other ranks on which the operation depends.
        watch: asked about these ranks meanwhile.
    """
    started = checked = time.monotonic()
    while not is_over(_LOOK_S):
        clock = time.monotonic()
        if watch.is_alarmed or clock - checked >= SLICE_S:
            checked = clock
            try:
                for rank in ranks:
                    watch.check(rank, clock - started)
            except HorovodInternalError:
                with contextlib.suppress(Exception):  # the engine's error would hide which rank is lost
                    if is_over(_LOOK_S):
                        return  # the rank did its part, and then left or failed, since this rank looked
                raise


def failed(error: Exception, name: str, ranks: Sequence[int], watch: Watch) -> HorovodInternalError:
    """Return the error to raise after an engine's failure; first check for some seconds whether a rank is lost.

    Args:
        error: the error of the engine.
        name: name of the engine.
        ranks: the other ranks of the group.
        watch: asked about these ranks.

    Raises:
        PeerLostError: one of these ranks is lost.
    """
    started = time.monotonic()
    while time.monotonic() - started < _GRACE_S:
        for rank in ranks:
            watch.check(rank, 0.0)
        time.sleep(_LOOK_S / 4)
    return HorovodInternalError(f"{name} failed between this rank and ranks {list(ranks)}: {error}")
