"""The engine between hosts, as protocols: groups of ranks that exchange bytes.

An engine mostly moves bytes; ``hierarchical`` interprets and reduces them. So each engine serves every dtype and every
reduction, and all ranks get the same bits. The plain sum of two ranks is the exception.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from horovod.errors import HorovodInternalError
from horovod.transports.base import Watch

__all__ = ["AddingGroup", "Bytes", "Group", "Groups", "Pending", "failed", "look_for", "wait_until"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Seconds between two checks of the awaited ranks; and between two looks for an alarm that requires a check at once.
_SLICE_S, _LOOK_S = 0.1, 0.02
#: Increase of the pause between two looks of ``look_for``, and the longest pause, in seconds.
_PAUSE_S, _LONGEST_PAUSE_S = 10e-6, 200e-6
#: Seconds that may pass until a rank whose connection broke is known as lost.
_GRACE_S = 3.0


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
    """Ranks that all call the same operations in the same order. Memory of an operation is in use until it is over."""

    ranks: tuple[int, ...]  # global ranks, in their order in the group
    me: int  # this rank's place among them

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], receive: Bytes, receive_counts: Sequence[int]
    ) -> Pending:
        """Begin to send the i-th part of ``send`` to the i-th rank, and to receive its part for this one."""

    def gather(self, part: Bytes, receive: Bytes, counts: Sequence[int]) -> Pending:
        """Begin to concatenate all ranks' parts, whose lengths are ``counts``, on all of them."""

    def broadcast(self, data: Bytes, root: int) -> Pending:
        """Begin to copy the data of the rank at place ``root`` to all others."""


@runtime_checkable
class AddingGroup(Protocol):
    """A ``Group`` whose engine can also add."""

    def add(self, data: Bytes, dtype: str) -> Pending:
        """Begin to replace floats of ``dtype`` by their sums over two ranks, whose order does not matter."""


class Groups(Protocol):
    """An engine between hosts."""

    name: str

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of some ranks; all of them first ask for it at the same point of the log.

        Raises:
            PeerLostError: one of them died or left meanwhile.
            HorovodInternalError: the engine could not connect them.

        The first call blocks until all of them are connected.
        """

    def close(self) -> None:
        """End all groups."""


def wait_until(is_over: Callable[[float], bool], ranks: Sequence[int], watch: Watch) -> None:
    """Block until an operation is over; ``is_over`` waits for it for the given seconds at most. Meanwhile ``watch`` is
    asked about the other ranks on which it depends.
    """
    started = checked = time.monotonic()
    while not is_over(_LOOK_S):
        clock = time.monotonic()
        if watch.is_alarmed or clock - checked >= _SLICE_S:
            checked = clock
            try:
                for rank in ranks:
                    watch.check(rank, clock - started)
            except HorovodInternalError:
                with contextlib.suppress(Exception):  # the engine's error would hide which rank is lost
                    if is_over(_LOOK_S):
                        return  # the rank did its part, and then left or failed, since this rank looked
                raise


def look_for(is_there: Callable[[], bool], slice_s: float) -> bool:
    """Poll ``is_there`` for ``slice_s`` seconds at most, less and less often; return whether it was true."""
    deadline, pause_s = time.monotonic() + slice_s, 0.0
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s + _PAUSE_S, _LONGEST_PAUSE_S)
    return True


def failed(error: Exception, name: str, ranks: Sequence[int], watch: Watch) -> HorovodInternalError:
    """Return the error to raise after an engine's failure; first check for some seconds whether a rank is lost.

    Raises:
        PeerLostError: one of these ranks is lost.
    """
    started = time.monotonic()
    while (waited_s := time.monotonic() - started) < _GRACE_S:
        for rank in ranks:
            watch.check(rank, waited_s)  # a rank that has left counts as lost only after a while
        time.sleep(_LOOK_S / 4)
    return HorovodInternalError(f"{name} failed between this rank and ranks {list(ranks)}: {error}")
