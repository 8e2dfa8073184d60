"""The processes of a job, and the failures on its hosts, as ``core.membership`` knows them."""

from __future__ import annotations

import collections
import enum
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from horovod.core.membership_events import Slot

__all__ = ["NOT_ALIVE", "CoolDowns", "Phase", "Process", "Standstill", "ordered"]

#: A failure on a host that comes later than this after its last cool-down counts as its first.
_CALM_S = 60.0
#: After how long, and then how often, the user hears for whom processes wait.
_REMIND_S = 30.0


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
    """A process of a job."""

    slot: Slot  # where it runs
    phase: Phase = Phase.OUTSIDE
    progress: int = 0  # steps that it has completed
    digest: str = ""  # hash of its state
    rank: int | None = None  # its rank in its last generation that began
    wants_out: bool = False  # it has asked to leave
    is_done: bool = False  # its training has ended
    is_dismissed: bool = False  # it was told to leave
    has_returned: bool = False  # it has left its generation by itself, and come to init() again
    fenced_s: float = math.inf  # when the launcher was told to kill it


def ordered(processes: Iterable[Process], hosts: Iterable[str]) -> list[Process]:
    """Furthest first, the most frequent state of equals first, then as before; newcomers last, by host."""
    processes = list(processes)
    arrival = {host: i for i, host in enumerate(hosts)}
    states = collections.Counter((p.progress, p.digest) for p in processes)

    def key(p: Process) -> tuple[float, ...]:
        state, last = (-p.progress, -states[p.progress, p.digest]), len(arrival)
        place = (arrival.get(p.slot.host, last), p.slot.number)
        return (1, *state, *place) if p.rank is None else (0, *state, p.rank, *place)

    return sorted(processes, key=key)


class CoolDowns:
    """The failures on each host, and the time for which no process is started there after one.

    This time doubles with each failure, from the first of ``range_s`` to the second, until a host has had none for a
    while. Without a range a host is not used again.
    """

    def __init__(self, range_s: tuple[float, float] | None) -> None:
        self._least_s, self._most_s = range_s or (math.inf, math.inf)
        self._failures: collections.Counter[str] = collections.Counter()
        self._ends_at: dict[str, float] = {}

    def fail(self, host: str, now_s: float, may_forget: bool) -> float:
        """Count a failure on a host, and return the seconds until it can be used again. ``may_forget``: a failure after
        a while without any counts as the first.
        """
        if may_forget and now_s > self.ends_at(host) + _CALM_S:
            self._failures[host] = 0
        self._failures[host] += 1
        return self.rest(host, now_s, self._failures[host] - 1)

    def rest(self, host: str, now_s: float, doublings: int = 0) -> float:
        """Let a host rest without a failure; return for how many seconds."""
        delay_s = min(self._most_s, self._least_s * 2.0 ** min(doublings, 64))
        self._ends_at[host] = now_s + delay_s
        return delay_s

    def ends_at(self, host: str) -> float:
        """Return when a host can be used again; infinity for never."""
        return self._ends_at.get(host, -math.inf)

    def count(self, hosts: Container[str] | None = None) -> int:
        """Return the number of failures on these hosts; None means all."""
        return sum(count for host, count in self._failures.items() if hosts is None or host in hosts)


class Standstill:
    """Since when processes have waited for others.

    Attributes:
        since_s: when this began; None as long as none waits.
    """

    def __init__(self) -> None:
        self.since_s: float | None = None
        self._told_s = 0.0

    def begin(self, now_s: float) -> None:
        """Count from now on."""
        self.since_s = self._told_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Return whether the user should hear of it, again."""
        if now_s - self._told_s < _REMIND_S:
            return False
        self._told_s = now_s
        return True
