"""Messages between a notebook's kernel and its ranks, as MessagePack over ZeroMQ with CURVE.

    kernel to rank   RunCell, Push, Meet: answered by Done    LeaveRanks    Stop
    rank to kernel   Hello    Done

A rank writes ``end_mark`` to its standard output and error after each cell. So the kernel knows that it has all
output of the cell, independent of the transport of the output.
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
    """Runs code in the ranks' namespace."""

    number: int  # number of the message
    interrupts: int  # number of interrupts that the kernel has sent before
    source: str  # the code
    name: str  # name of the code in tracebacks
    wants_all: bool  # whether to return every rank's value, instead of only rank 0's
    most_bytes: int  # maximum size of a pickled value; a larger value is sent only as text


class Push(msgspec.Struct, tag="push", array_like=True, frozen=True):
    """Sets variables: ``data`` is a pickled dictionary."""

    number: int
    interrupts: int
    data: bytes


class Meet(msgspec.Struct, tag="meet", array_like=True, frozen=True):
    """Leaves the job, and joins the other ranks in a new rendezvous."""

    number: int
    interrupts: int


class LeaveRanks(msgspec.Struct, tag="leave", array_like=True, frozen=True):
    """Leaves the job after a failure, so that ranks that wait for this one get a ``PeerLostError``."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Ends the rank."""


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """A rank is ready."""

    rank: int


class Done(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """Reply after the execution of a message."""

    number: int  # number of the message
    value: bytes = b""  # pickled value of the last expression; empty if there is none, or it cannot be sent
    text: str = ""  # ``repr`` of the value
    error: str = ""  # type and message of an exception in one line; empty on success
    traceback: str = ""  # traceback of that exception
    is_loss: bool = False  # whether the exception reports the loss of another rank
    submitted: int = -1  # number of operations that this rank has submitted; -1 without ``hvd.init()``
    is_broken: bool = False  # whether collectives are not done, or cannot be called any more


ToRank = RunCell | Push | Meet | LeaveRanks | Stop
FromRank = Hello | Done


def end_mark(number: int, rank: int, stream: int) -> bytes:
    """Return the byte sequence that marks the end of the output of one message.

    Args:
        number: number of the message.
        rank: rank that wrote the output.
        stream: 1 for standard output, 2 for standard error.
    """
    return b"\0hvd %d %d %d\0\n" % (number, rank, stream)
