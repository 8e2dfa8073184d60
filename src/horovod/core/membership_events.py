"""Events and decisions of ``core.membership``, and the policy that it follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "Arrived",
    "Assign",
    "Begin",
    "Decision",
    "Discovered",
    "Dissolve",
    "Ended",
    "Event",
    "Fence",
    "Finish",
    "Gone",
    "Joined",
    "Leaving",
    "Left",
    "Paused",
    "Policy",
    "Position",
    "Ready",
    "Refuse",
    "Silent",
    "Slot",
    "Start",
    "Tick",
]


class Slot(NamedTuple):
    """A place for one process: the ``number``-th of its host."""

    host: str
    number: int

    def __str__(self) -> str:
        return f"{self.host}:{self.number}"


class Ready(NamedTuple):
    """The process in a slot waits in ``init()``.

    Attributes:
        slot: where it runs.
        progress: number of steps that it has completed; -1 if it was new in its last generation and has not received
            the state of the others.
        digest: hash of its state; equal digests mean equal states.
    """

    slot: Slot
    progress: int = 0
    digest: str = ""


class Joined(NamedTuple):
    """The process in a slot has met the other members of a generation."""

    slot: Slot
    generation: int


class Arrived(NamedTuple):
    """A process that another launcher started has arrived, in a slot that no process had before."""

    slot: Slot


class Ended(NamedTuple):
    """The process in a slot has ended; ``how`` is empty after a success, else words such as "exited with code 1"."""

    slot: Slot
    how: str = ""


class Left(NamedTuple):
    """The process in a slot has left its generation; the others need not wait for it."""

    slot: Slot


class Leaving(NamedTuple):
    """The process in a slot wants to leave the job at the next change; until then it is a member like any other."""

    slot: Slot


class Discovered(NamedTuple):
    """The hosts that the job may use now, and the number of slots of each; hosts that are missing are withdrawn."""

    hosts: Mapping[str, int]


class Tick(NamedTuple):
    """Time has passed; ``now_s`` is a monotonic clock in seconds."""

    now_s: float


class Position(NamedTuple):
    """Place of one slot in a generation.

    Attributes:
        rank, local_rank, local_size, cross_rank, cross_size: as users know them.
        is_behind: whether its state differs from the state of rank 0; assumed for a newcomer without a digest.
        previous: its rank in the last generation that began and that it was a member of; -1 for newcomers.
    """

    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_behind: bool
    previous: int = -1


class Assign(NamedTuple):
    """Tell each of these slots, which wait in ``init()``, its position, in rank order."""

    generation: int
    positions: dict[Slot, Position]


class Begin(NamedTuple):
    """All members have joined: let ``init()`` return."""

    generation: int


class Paused(NamedTuple):
    """A member has left a complete generation for the next one: work pauses until the next one begins."""

    generation: int


class Dissolve(NamedTuple):
    """A member was lost before all had joined: the other members wait for an assignment again."""

    generation: int


class Start(NamedTuple):
    """Start a process in a free slot."""

    slot: Slot


class Fence(NamedTuple):
    """Kill the process in a slot: it does not come, and the others wait for it. ``Ended`` must follow."""

    slot: Slot
    why: str


class Silent(NamedTuple):
    """The process in a slot has been silent for some seconds: kill it if a signal has stopped it.

    Attributes:
        slot: where it runs.
        pid: its process id.
        why: the reason to report in that case.
    """

    slot: Slot
    pid: int
    why: str


class Gone(NamedTuple):
    """A process that another launcher started has ended; for the output. ``how`` is empty after a success."""

    slot: Slot
    pid: int
    how: str


class Refuse(NamedTuple):
    """Let ``init()`` raise an error in this slot; ``is_dismissal`` means that nothing has failed."""

    slot: Slot
    why: str
    is_dismissal: bool = False


class Finish(NamedTuple):
    """End the job; ``why`` is empty after a success."""

    why: str


Event = Arrived | Ready | Joined | Ended | Left | Leaving | Discovered | Tick
Decision = Assign | Begin | Dissolve | Paused | Start | Fence | Silent | Gone | Refuse | Finish


@dataclass(frozen=True)
class Policy:
    """How the job reacts to losses and new hosts.

    Attributes:
        size: number of ranks at the start. In a job that is not elastic it never changes, and a failure ends the job.
        is_elastic: whether the job goes on with other members.
        minimum: fewest ranks to go on with.
        maximum: most ranks; 0 means ``size``.
        resets: number of generations after the first one; None for no limit.
        cool_down_s: time until a host is used again after a failure of a process there, and the limit of this time,
            which doubles with each failure. None: free slots of that host are not used again.
        timeout_s: limit for all waiting.
        start_timeout_s: limit for all waiting before the first generation; 0 means ``timeout_s``.
        is_discovering: whether ``Discovered`` can still bring other hosts.
        spares: number of processes that are started beyond ``maximum``, and wait to take the place of a lost one.
        is_open: whether another launcher starts the processes; then the arriving processes define slots and hosts.
    """

    size: int
    is_elastic: bool = False
    minimum: int = 1
    maximum: int = 0
    resets: int | None = None
    cool_down_s: tuple[float, float] | None = None
    timeout_s: float = 600.0
    start_timeout_s: float = 0.0
    is_discovering: bool = False
    spares: int = 0
    is_open: bool = False

    @property
    def fewest(self) -> int:
        """Fewest ranks of a generation."""
        return self.minimum if self.is_elastic else self.size

    @property
    def most(self) -> int:
        """Most ranks of a generation."""
        return self.maximum or self.size if self.is_elastic else self.size
