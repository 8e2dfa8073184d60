"""Messages between the processes of an elastic job and its service.

    process to service   MemberNews: its state; repeated every second, so that nothing is lost with a connection
    service to process   MemberStatus, at each change too     MemberPlace: its rank in a generation     Refused
    watch to service     WatchNews, every second and at each end     service to watch   WatchOrders

The process counts its attempts to join a generation; a ``MemberPlace`` that answers an earlier one has no effect.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["MemberNews", "MemberPlace", "MemberStatus", "Refused", "WatchNews", "WatchOrders"]

_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class MemberNews(msgspec.Struct, array_like=True, frozen=True, tag="news"):
    """A message of a process.

    Attributes:
        host, number: its slot.
        nonce: nonce of the process.
        pid: its process id.
        verb: "here": nothing else; "ready": it waits for a place; "joined": it has met the members of ``generation``;
            "left": it has left its generation.
        attempt: counts its attempts to join a generation.
        generation: for "joined".
        progress, digest: for "ready", as in ``core.membership_events.Ready``.
        wants_out: whether it wants to leave the job at the next change.
        how: for "left" at the end of a process, the exception that ends it.
    """

    host: _Text
    number: Annotated[int, msgspec.Meta(ge=0)]
    nonce: _Nonce
    pid: int
    verb: Literal["here", "ready", "joined", "left"] = "here"
    attempt: int = 0
    generation: int = 0
    progress: int = 0
    digest: _Text = ""
    wants_out: bool = False
    how: _Text = ""


class MemberPlace(msgspec.Struct, array_like=True, tag="place"):
    """The place of a process in a generation.

    Attributes:
        attempt: number of the attempt that this answers.
        generation: its number.
        rank, size, local_rank, local_size, cross_rank, cross_size: as users know them.
        behind: ranks whose state differs from that of rank 0.
        previous: rank in the previous generation, by rank; -1 for newcomers.
    """

    attempt: int
    generation: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    behind: list[int]
    previous: list[int]


class MemberStatus(msgspec.Struct, array_like=True, frozen=True, tag="status"):
    """All that a process needs to know at any time.

    Attributes:
        placed: the generation in which it has a place, 0 for none.
        begun: the latest generation that has begun, 0 for none.
        size: size of that generation; before the first, the size at which the job begins.
        wants_change: whether there should be another generation.
        is_spread: whether the processes are on several hosts.
    """

    placed: int
    begun: int
    size: int
    wants_change: bool
    is_spread: bool = False


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """Tells a process that there is no place for it.

    Attributes:
        attempt: number of the attempt that this answers.
        why: the reason, in words.
        is_dismissal: whether it is no failure.
    """

    attempt: int
    why: str
    is_dismissal: bool


class WatchNews(msgspec.Struct, array_like=True, frozen=True, tag="watch"):
    """A message of the process that watches a host's processes, where another launcher has started these.

    Attributes:
        host: its host.
        ended: numbers of slots whose process has ended.
    """

    host: _Text
    ended: list[int] = []


class WatchOrders(msgspec.Struct, array_like=True, frozen=True, tag="orders"):
    """Orders for the watching process.

    Attributes:
        pids: slot number and process id of each process to watch.
        kill: numbers of slots whose process is to be killed.
        kill_stopped: numbers of slots whose process is to be killed if a signal has stopped it.
        is_over: whether the job has ended, so that nothing is left to do.
    """

    pids: list[tuple[int, int]]
    kill: list[int]
    kill_stopped: list[int]
    is_over: bool
