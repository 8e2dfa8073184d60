"""Messages between the leaders of hosts and rank 0's leader, the hub: typed, several to a frame.

    leader to hub    Declare, Submit, Leave        requests of its ranks
                     Payload                       the data of a small operation, before its submission
                     DeclareGroup, SubmitGroups    requests of all its ranks by one number
    hub to leader    LogEntry                      the log
    both             RankState, Question, Answer, Kernel, StartTrace, Trace, Told, Arrivals, Ping, Pong, Bye

Data of a wrong type or length is not a frame. Each frame has a number, one more than the one before it on the
same connection: a receiver of another number has lost a frame, or has received one again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec

from horovod.core.coordinator import LogEntry
from horovod.core.gathering import Declare, DeclareGroup, Leave, Rank, Submit, SubmitGroups
from horovod.engine.board import TimelineSession

__all__ = [
    "MAX_ITEMS",
    "Answer",
    "Arrivals",
    "Bye",
    "Declare",
    "DeclareGroup",
    "Kernel",
    "Leave",
    "LogEntry",
    "Message",
    "Payload",
    "Ping",
    "Pong",
    "Question",
    "RankState",
    "StartTrace",
    "Submit",
    "SubmitGroups",
    "Told",
    "Trace",
    "decode",
    "encode",
    "number_of",
    "numbered",
]

#: Messages of one frame, at most.
MAX_ITEMS = 1 << 16
_HEAD = struct.Struct("<Q")
Text = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class RankState(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The state of a rank: its own word, or a finding of its leader or the hub."""

    rank: Rank
    state: Annotated[int, msgspec.Meta(ge=0, le=4)]  # see `transports.shm.control.Presence`, or `remote_ranks.DEAD`
    cause: int = -1  # the rank that caused it, or -1
    fate: str = ""  # how it ended, in words
    reason: Text | None = None  # its message on the board


class Question(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """``asker`` asks ``rank``; ``number`` counts the questions of the asker's host to this rank."""

    rank: Rank
    asker: Rank
    wanted: Annotated[int, msgspec.Meta(ge=0, le=255)]
    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The answer of ``rank`` to question ``number`` of the host of ``asker``."""

    rank: Rank
    asker: Rank
    number: int
    text: Text


class Kernel(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The kernel's view of the process of ``rank``, for ``asker``."""

    rank: Rank
    asker: Rank
    state: Annotated[str, msgspec.Meta(min_length=1, max_length=1)]
    cpu_s: float


class StartTrace(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Rank 0 has begun or ended a recording. Times are of rank 0's host."""

    session: TimelineSession


class Trace(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Trace events of ``rank``."""

    rank: Rank
    data: Text


class Told(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """``rank`` has sent all events of recording ``number``."""

    rank: Rank
    number: int


class Arrivals(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The submissions of ``rank``: pairs of a key and a time, on the clock of rank 0's host."""

    rank: Rank
    pairs: list[tuple[int, int]]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A sign of life; ``sent_ns`` comes back."""

    sent_ns: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The answer to a ping, and the time at which it was given."""

    sent_ns: int
    at_ns: int


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The last message on a connection, or the answer to it."""

    # whether the sender is about to close the connection; a sender that only answers goes on listening
    leaves: bool = True


class Payload(msgspec.Struct, frozen=True, array_like=True, tag=19, gc=False):
    """The data that ``rank`` sends with the submission that has this note; the hub passes it on to all others."""

    rank: Rank
    note: int
    data: Annotated[bytearray, msgspec.Meta(max_length=1 << 20)]


Message = (
    Declare
    | Submit
    | Leave
    | LogEntry
    | RankState
    | Question
    | Answer
    | Kernel
    | StartTrace
    | Trace
    | Told
    | Arrivals
    | Ping
    | Pong
    | Bye
    | DeclareGroup
    | SubmitGroups
    | Payload
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Annotated[list[Message], msgspec.Meta(max_length=MAX_ITEMS)]).decode


def encode(messages: Sequence[Message]) -> bytes:
    """Return the body of a frame."""
    return _encode(messages)


def decode(frame: bytes) -> list[Message]:
    """Return the messages of a frame.

    Raises:
        ValueError: it is not a valid frame.
    """
    if len(frame) < _HEAD.size:
        raise ValueError(f"a frame has at least {_HEAD.size} bytes; received {len(frame)}")
    try:
        messages: list[Message] = _decode(memoryview(frame)[_HEAD.size :])
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    return messages


def numbered(number: int, body: bytes) -> bytes:
    """Return a frame."""
    return _HEAD.pack(number) + body


def number_of(frame: bytes) -> int:
    """Return the number of a frame; -1 if the data is too short for one."""
    return int(_HEAD.unpack_from(frame)[0]) if len(frame) >= _HEAD.size else -1
