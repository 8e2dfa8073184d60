"""What the leaders of the hosts say to the place where they meet, and what it answers.

    leader to meeting point   Come, again every second   Gone: it has given up   Ask: what became of a rank
                              Failed: nobody of its host will come
    meeting point to leader   Waiting: for whom          Roster: all are here    Refusal: there will be no job
                              Fate: of that rank
    leader to rank 0's        Joined                     Go: all have joined

Each message is an envelope with the version of this package, so that other versions are told apart before anything
else is read; then a typed struct of msgpack. What does not fit its type is dropped.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from horovod._version import __version__
from horovod.errors import InitError, PeerLostError

__all__ = [
    "MAX_BYTES",
    "Answer",
    "Ask",
    "Come",
    "Failed",
    "Fate",
    "Go",
    "Gone",
    "HostOffer",
    "Joined",
    "Question",
    "Refusal",
    "Roster",
    "Waiting",
    "pack",
    "unpack",
    "version_of",
]

MAX_BYTES = 8 << 20
"""Size of a message, at most; a host with 10000 ranks needs 100 KiB."""


class HostOffer(msgspec.Struct, array_like=True, frozen=True):
    """One host of a job.

    Attributes:
        hostname: its name; two hosts may have the same.
        ranks: of the job, in the order of their local ranks.
        pids: their process ids there.
        version: of this package.
        addresses: of the host; the one that leads to the others first.
        store: where rank 0's store listens, several addresses of one place; empty on other hosts.
    """

    hostname: str
    ranks: list[int]
    pids: list[int]
    version: str
    addresses: list[str] = []
    store: list[str] = []


class Come(msgspec.Struct, array_like=True, frozen=True, tag="come"):
    """A leader wants to meet.

    Attributes:
        number: of the meeting.
        size: number of ranks in the job.
        nonce: of this attempt.
        offer: its host.
        control: where the leader of rank 0 listens; empty for the others.
    """

    number: int
    size: int
    nonce: bytes
    offer: HostOffer
    control: list[str] = []


class Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    """A leader has given up.

    Attributes:
        number: of the meeting.
        nonce: of its attempt.
        error: why.
        lost: the rank that died, if that is why, else -1.
    """

    number: int
    nonce: bytes
    error: str
    lost: int = -1


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The ranks of a host did not even find each other; no leader of theirs will come.

    Attributes:
        number: of the meeting.
        size: number of ranks in the job.
        absent: how many of them were to be on that host.
        error: why.
        is_loss: whether one of them is gone.
    """

    number: int
    size: int
    absent: int
    error: str
    is_loss: bool


class Ask(msgspec.Struct, array_like=True, frozen=True, tag="ask"):
    """A leader wants to know what became of a rank that it cannot reach any more.

    Attributes:
        rank: of the job.
    """

    rank: int


class Fate(msgspec.Struct, array_like=True, frozen=True, tag="fate"):
    """What became of a rank.

    Attributes:
        rank: of the job.
        how: such as "was killed by SIGKILL"; empty as long as nothing is known.
    """

    rank: int
    how: str


class Waiting(msgspec.Struct, array_like=True, frozen=True, tag="waiting"):
    """Not all are here yet.

    Attributes:
        missing: for whom all others wait, in words.
    """

    missing: str


class Roster(msgspec.Struct, array_like=True, frozen=True, tag="roster"):
    """All hosts are here.

    Attributes:
        nonce: of the attempt that this answers.
        offers: by their lowest rank.
        control: where the leader of rank 0 listens.
    """

    nonce: bytes
    offers: list[HostOffer]
    control: list[str]


class Refusal(msgspec.Struct, array_like=True, frozen=True, tag="refusal"):
    """There is no job.

    Attributes:
        error: why.
        lost: the rank that died, if that is why, else -1.
        is_loss: whether a rank died, of which nobody may know which one of the job it was.
    """

    error: str
    lost: int = -1
    is_loss: bool = False

    def enforce(self) -> None:
        """Raise what it says.

        Raises:
            PeerLostError: a rank died.
            InitError: there is no job for another reason.
        """
        if self.lost >= 0 or self.is_loss:
            raise PeerLostError(self.error, rank=self.lost)
        raise InitError(self.error)


class Joined(msgspec.Struct, array_like=True, frozen=True, tag="joined"):
    """A leader is connected with that of rank 0.

    Attributes:
        index: of its host.
        where: the address of rank 0's host that led there.
    """

    index: int
    where: str


class Go(msgspec.Struct, array_like=True, frozen=True, tag="go"):
    """All leaders are connected."""


Question = Come | Gone | Failed | Ask
Answer = Waiting | Roster | Refusal | Fate


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    version: str
    body: bytes


_T = TypeVar("_T")


def pack(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(_Envelope(__version__, msgspec.msgpack.encode(message)))


def version_of(data: bytes) -> str:
    """Return the version of the package that has sent a message; empty when it is none."""
    try:
        return msgspec.msgpack.decode(data, type=_Envelope).version
    except msgspec.DecodeError:
        return ""


def unpack(data: bytes, kind: type[_T]) -> _T | None:
    """Return a message; None when it is none of this kind and version.

    Args:
        data: what has come.
        kind: a struct, or a union of them.
    """
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        return msgspec.msgpack.decode(envelope.body, type=kind) if envelope.version == __version__ else None
    except msgspec.DecodeError:
        return None
