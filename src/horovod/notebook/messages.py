"""Messages between a notebook's kernel and its ranks, as MessagePack over ZeroMQ with CURVE.

    kernel to rank   RunCell, Push, Meet: answered by Done    LeaveRanks    Stop
    rank to kernel   Hello    Done

A rank ends the output of each cell with ``end_mark`` on its standard output and error, so that the kernel knows, on
whatever way output comes, when it has all of it.
"""

from __future__ import annotations

import re

import msgspec

__all__ = [
    "CELLS",
    "CELLS_VARIABLE",
    "END_MARK",
    "MOST_BYTES",
    "PROGRAM",
    "Done",
    "FromRank",
    "Hello",
    "LeaveRanks",
    "Meet",
    "Push",
    "RunCell",
    "Stop",
    "ToRank",
    "end_mark",
]

CELLS = "cells"
"""Purpose of the key of these connections."""
CELLS_VARIABLE = "_HOROVOD_CELLS"
"""Where the kernel listens; not a setting."""
PROGRAM = "horovod.notebook.cells"
"""The module that a rank runs."""
MOST_BYTES = 1 << 30
"""Size of a message, at most."""
END_MARK = re.compile(rb"(^\[\d+\] )?\0hvd (\d+) (\d+) (\d)\0\n", re.MULTILINE)
"""With the label of its line if nothing else is in that line; number of the message, rank, and stream."""


class RunCell(msgspec.Struct, tag="run", array_like=True, frozen=True):
    """Runs code in the ranks' namespace.

    Attributes:
        number: of the message.
        source: the code.
        name: what tracebacks call it.
        wants_all: whether every rank's value is wanted, rather than rank 0's.
        most_bytes: a larger value is sent as text only.
    """

    number: int
    source: str
    name: str
    wants_all: bool
    most_bytes: int


class Push(msgspec.Struct, tag="push", array_like=True, frozen=True):
    """Sets variables: ``data`` is a pickled dictionary."""

    number: int
    data: bytes


class Meet(msgspec.Struct, tag="meet", array_like=True, frozen=True):
    """Leaves the other ranks, and meets them again."""

    number: int


class LeaveRanks(msgspec.Struct, tag="leave", array_like=True, frozen=True):
    """Leaves the other ranks after a failure, so that those which wait for this one get a ``PeerLostError``."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Ends the rank."""


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """A rank is ready."""

    rank: int


class Done(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """A message was carried out.

    Attributes:
        number: of the message.
        value: of the last expression, pickled; empty when there is none, or it cannot be sent.
        text: the same as ``repr`` shows it.
        error: type and message of an exception in one line; empty when all went well.
        traceback: of that exception.
        is_loss: whether it says that another rank is lost.
        submitted: how many operations this rank has submitted; -1 without ``hvd.init()``.
        in_flight: how many of them are not done.
    """

    number: int
    value: bytes = b""
    text: str = ""
    error: str = ""
    traceback: str = ""
    is_loss: bool = False
    submitted: int = -1
    in_flight: int = 0


ToRank = RunCell | Push | Meet | LeaveRanks | Stop
FromRank = Hello | Done


def end_mark(number: int, rank: int, stream: int) -> bytes:
    """Return what ends the output of one message.

    Args:
        number: of the message.
        rank: whose output it is.
        stream: 1 for standard output, 2 for standard error.
    """
    return b"\0hvd %d %d %d\0\n" % (number, rank, stream)
