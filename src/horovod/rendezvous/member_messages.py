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
