"""Messages of the job service, which every host of a job reaches: meetings, ends of ranks, and a shared table.

    leader of a host to service   Join, again every second    GiveUp                  Failed: its host will not come
    any rank to service           Ask: how a rank ended       Table: read or change the shared table
    service to leader             StillMissing: which ranks   AllHere                 Refusal: there is no job
    service to any rank           Fate: how a rank ended      Value: of the table
    leader to rank 0's leader     Connected                   Go: all have connected

    in elastic jobs:
    process to service            MemberNews: its state; again every second, so that no connection loses it
    service to process            MemberStatus, at each change too    MemberPlace: its rank in a generation    Refused
    watch to service              WatchNews, every second and at each end
    service to watch              WatchOrders

Each message travels in an envelope with the version of this package, which is checked first, and a number that its
answer repeats. The body is a typed struct in MessagePack; a message that does not fit its type is dropped. A process
counts its attempts to join a generation; a ``MemberPlace`` that answers an earlier one has no effect.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from horovod._version import __version__
from horovod.errors import HorovodInternalError, PeerLostError
from horovod.rendezvous.messages import Verdict

__all__ = [
    "MAX_BYTES",
    "AllHere",
    "Answer",
    "Answers",
    "Ask",
    "Connected",
    "Failed",
    "Fate",
    "GiveUp",
    "Go",
    "HostEntry",
    "Join",
    "MemberNews",
    "MemberPlace",
    "MemberStatus",
    "Question",
    "Refusal",
    "Refused",
    "StillMissing",
    "Table",
    "Value",
    "WatchNews",
    "WatchOrders",
    "number_of",
    "pack",
    "unpack",
    "version_of",
]

MAX_BYTES = 8 << 20
"""Largest message; a host with 10000 ranks needs 100 KiB."""

_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class HostEntry(msgspec.Struct, array_like=True, frozen=True):
    """One host of a job."""

    hostname: str  # its name; two hosts may have the same
    ranks: list[int]  # its ranks in the job, in the order of their local ranks
    pids: list[int]  # their process ids there
    version: str  # version of this package
    addresses: list[str] = []  # addresses of the host; the one that leads to the others first


class Join(msgspec.Struct, array_like=True, frozen=True, tag="join"):
    """A leader wants to join a meeting."""

    generation: int  # counts the times that the ranks of the job have met
    size: int  # number of ranks in the job
    nonce: bytes  # nonce of this attempt
    entry: HostEntry  # its host
    control: list[str] = []  # endpoints of rank 0's leader; empty for the others
    run: str = ""  # name of the part of the job that meets; empty for the whole job
    members: tuple[int, ...] = ()  # numbers in the whole job, by rank of the part; empty for the whole job


class GiveUp(msgspec.Struct, array_like=True, frozen=True, tag="leave"):
    """A leader has given up."""

    generation: int  # as in its `Join`
    nonce: bytes  # nonce of its attempt
    refusal: Refusal  # the reason
    run: str = ""  # as in its `Join`


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The ranks of a host did not find each other: no leader of that host will come."""

    generation: int  # as in `Join`
    size: int  # number of ranks in the job
    absent: int  # number of ranks of that host
    refusal: Refusal  # the reason
    run: str = ""  # as in `Join`


class Ask(msgspec.Struct, array_like=True, frozen=True, tag="ask"):
    """Asks how a rank ended."""

    rank: int  # rank in the job
    generation: int = 0  # generation in which it has this rank; 0 in a job that is not elastic


class Fate(msgspec.Struct, array_like=True, frozen=True, tag="fate"):
    """How a rank ended."""

    rank: int  # rank in the job
    how: str  # such as "was killed by SIGKILL"; empty as long as it is not known to have ended
    generation: int = 0  # as in `Ask`


class Table(msgspec.Struct, array_like=True, frozen=True, tag="table"):
    """Reads or changes the shared table; ``get`` is answered as soon as the key has a value."""

    verb: Literal["set", "get", "add", "check"]
    key: Annotated[str, msgspec.Meta(max_length=4096)]  # key of the entry; begins with the generation
    value: bytes = b""  # for `set`
    amount: int = 0  # for `add`


class Value(msgspec.Struct, array_like=True, frozen=True, tag="value"):
    """Answer to ``Table``; ``amount`` is a sum, or whether there was an entry."""

    value: bytes = b""
    amount: int = 0


class StillMissing(msgspec.Struct, array_like=True, frozen=True, tag="waiting"):
    """Not all hosts are here yet; ``missing`` names the ranks that all others wait for."""

    missing: str


class AllHere(msgspec.Struct, array_like=True, frozen=True, tag="members"):
    """All hosts are here."""

    nonce: bytes  # nonce of the attempt that this answers
    entries: list[HostEntry]  # the hosts, ordered by their lowest rank
    control: list[str]  # endpoints of rank 0's leader


class Refusal(Verdict, array_like=True, frozen=True, tag="refusal"):
    """There is no job."""

    @classmethod
    def of(cls, error: BaseException, otherwise: str) -> Refusal:
        """Return the refusal because of an error; ``otherwise`` is the reason if that is no error of this package."""
        is_loss = isinstance(error, PeerLostError)
        text = str(error) if isinstance(error, HorovodInternalError) else otherwise
        return cls(text, error.rank if isinstance(error, PeerLostError) else -1, is_loss)


class Connected(msgspec.Struct, array_like=True, frozen=True, tag="joined"):
    """A leader is connected to rank 0's leader."""

    index: int  # index of its host
    where: str  # endpoint of rank 0's host that it has reached


class Go(msgspec.Struct, array_like=True, frozen=True, tag="go"):
    """All leaders are connected."""


class MemberNews(msgspec.Struct, array_like=True, frozen=True, tag="news"):
    """A message of the process in a slot."""

    host: _Text
    number: Annotated[int, msgspec.Meta(ge=0)]
    nonce: _Nonce
    pid: int
    # "here": nothing else; "ready": it waits for a place; "joined": it has met the members of `generation`; "left": it
    # has left its generation; "done": its training has ended, and that of the others
    verb: Literal["here", "ready", "joined", "done", "left"] = "here"
    attempt: int = 0  # counts its attempts to join a generation
    generation: int = 0  # for "joined"
    progress: int = 0  # for "ready", as in `core.membership_events.Ready`; for "done" and "left", too
    digest: _Text = ""  # for "ready"
    wants_out: bool = False  # whether it wants to leave the job at the next change
    how: _Text = ""  # for "left" at the end of a process, the exception that ends it


class MemberPlace(msgspec.Struct, array_like=True, tag="place"):
    """The place of a process in a generation, with ranks and sizes as users know them."""

    attempt: int  # number of the attempt that this answers
    generation: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    behind: list[int]  # ranks whose state differs from that of rank 0
    previous: list[int]  # rank in the previous generation, by rank; -1 for newcomers


class MemberStatus(msgspec.Struct, array_like=True, frozen=True, tag="status"):
    """All that a process needs to know at any time."""

    placed: int  # the generation in which it has a place, 0 for none
    begun: int  # the latest generation that has begun, 0 for none
    size: int  # size of that generation; before the first, the size at which the job begins
    wants_change: bool  # whether there should be another generation
    # whether the processes are on several hosts, or may be later; then they load the engine early
    may_spread: bool = False


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """Tells a process that there is no place for it."""

    attempt: int  # number of the attempt that this answers
    why: str  # the reason, in words
    is_dismissal: bool  # whether it is not a failure


class WatchNews(msgspec.Struct, array_like=True, frozen=True, tag="watch"):
    """A message of the process that watches a host's processes, where another launcher has started these."""

    host: _Text
    ended: list[int] = []  # numbers of slots whose process has ended


class WatchOrders(msgspec.Struct, array_like=True, frozen=True, tag="orders"):
    """Orders for the watching process."""

    pids: list[tuple[int, int]]  # slot number and process id of each process to watch
    kill: list[int]  # numbers of slots whose process is to be killed
    kill_stopped: list[int]  # numbers of slots whose process is to be killed if a signal has stopped it
    is_over: bool  # whether the job has ended, so that nothing is left to do


Question = Join | GiveUp | Failed | Ask | Table | MemberNews | WatchNews
Answer = StillMissing | AllHere | Refusal | Fate | Value | MemberStatus | MemberPlace | Refused | WatchOrders
Answers = list[tuple[bytes, Answer]]
"""Answers, each with its receiver."""


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    version: str
    number: int
    body: bytes


_T = TypeVar("_T")


def pack(message: msgspec.Struct, number: int = 0) -> bytes:
    """Return the bytes of a message; an answer has the number of its question."""
    return msgspec.msgpack.encode(_Envelope(__version__, number, msgspec.msgpack.encode(message)))


def version_of(data: bytes) -> str:
    """Return the version of the package that has sent a message; empty when it is not a message."""
    try:
        return msgspec.msgpack.decode(data, type=_Envelope).version
    except msgspec.DecodeError:
        return ""


def number_of(data: bytes) -> int:
    """Return the number in the envelope of a message; -1 when it is not a message."""
    try:
        return msgspec.msgpack.decode(data, type=_Envelope).number
    except msgspec.DecodeError:
        return -1


def unpack(data: bytes, kind: type[_T]) -> _T | None:
    """Return a message; None when it is not of this kind, a struct or a union of structs, and version."""
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        return msgspec.msgpack.decode(envelope.body, type=kind) if envelope.version == __version__ else None
    except msgspec.DecodeError:
        return None
