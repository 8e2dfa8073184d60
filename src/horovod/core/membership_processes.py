"""The processes of a job, as ``core.membership`` knows them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from horovod.core.membership_events import Slot

__all__ = ["NOT_ALIVE", "Phase", "Process"]


class Phase(enum.Enum):
    """Where a process is."""

    OUTSIDE = enum.auto()  # it runs, but is neither in init() nor a member
    WAITING = enum.auto()  # in init(), without a position
    ASSIGNED = enum.auto()  # in init(), with a position
    JOINED = enum.auto()  # a member
    GONE = enum.auto()  # it runs, and nobody waits for it
    FENCED = enum.auto()


#: Phases of processes that take no part any more.
NOT_ALIVE = (Phase.GONE, Phase.FENCED)


@dataclass
class Process:
    """A process of a job.

    Attributes:
        slot: where it runs.
        phase: where it is.
        progress: steps that it has completed.
        digest: hash of its state.
        rank: in its last generation that began.
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
