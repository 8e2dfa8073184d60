"""The processes of a job, as ``core.membership`` knows them."""

from __future__ import annotations

import collections
import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from horovod.core.membership_events import Slot

__all__ = ["NOT_ALIVE", "Phase", "Process", "ordered"]


class Phase(enum.Enum):
    """Where a process is."""

    OUTSIDE = enum.auto()  # it runs, but is neither in init() nor a member
    WAITING = enum.auto()  # in init(), without a position
    ASSIGNED = enum.auto()  # in init(), with a position
    JOINED = enum.auto()  # a member
    GONE = enum.auto()  # it runs, and nobody waits for it
    FENCED = enum.auto()


#: Phases of processes that no longer take part.
NOT_ALIVE = (Phase.GONE, Phase.FENCED)


@dataclass
class Process:
    """A process of a job.

    Attributes:
        slot: where it runs.
        phase: where it is.
        progress: steps that it has completed.
        digest: hash of its state.
        rank: its rank in its last generation that began.
        wants_out: it has asked to leave.
        is_dismissed: it was told to leave.
        fenced_s: when the launcher was told to kill it.
    """

    slot: Slot
    phase: Phase = Phase.OUTSIDE
    progress: int = 0
    digest: str = ""
    rank: int | None = None
    wants_out: bool = False
    is_dismissed: bool = False
    fenced_s: float = math.inf


def ordered(processes: Iterable[Process], hosts: Iterable[str]) -> list[Process]:
    """Furthest first, the most frequent state of equals first, then as before; newcomers last, by their host.

    Args:
        processes: to be ordered.
        hosts: in the order of their arrival.
    """
    processes = list(processes)
    arrival = {host: i for i, host in enumerate(hosts)}
    states = collections.Counter((p.progress, p.digest) for p in processes)

    def key(p: Process) -> tuple[float, ...]:
        state, last = (-p.progress, -states[p.progress, p.digest]), len(arrival)
        place = (arrival.get(p.slot.host, last), p.slot.number)
        return (1, *state, *place) if p.rank is None else (0, *state, p.rank, *place)

    return sorted(processes, key=key)
