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
    "Note",
    "Paused",
    "Policy",
    "Position",
    "Ready",
    "Refuse",
    "Silent",
    "Slot",
    "Start",
    "Tick",
    "TrainingEnded",
    "TrainingOver",
]


class Slot(NamedTuple):
    """A place for one process: the ``number``-th of its host."""

    host: str
    number: int

    def __str__(self) -> str:
        return f"{self.host}:{self.number}"


class Ready(NamedTuple):
    """The process in a slot waits in ``init()``."""

    slot: Slot  # where it runs
    # number of steps that it has completed; -1 if it was new in its last generation and has not received the state of
    # the others
    progress: int = 0
    digest: str = ""  # hash of its state; equal digests mean equal states


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


class TrainingEnded(NamedTuple):
    """The process in a slot has ended its training, as all members have; it needs no others until it is ready again."""

    slot: Slot


class Discovered(NamedTuple):
    """The hosts that the job may use now, and the number of slots of each; hosts that are missing are withdrawn."""

    hosts: Mapping[str, int]


class Tick(NamedTuple):
    """Time has passed; ``now_s`` is a monotonic clock in seconds."""

    now_s: float


class Position(NamedTuple):
    """Place of one slot in a generation, with ranks and sizes as users know them."""

    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_behind: bool  # whether its state differs from the state of rank 0; assumed for a newcomer without a digest
    previous: int = -1  # its rank in the last generation that began and that it was a member of; -1 for newcomers


class Assign(NamedTuple):
    """Tell each of these slots, which wait in ``init()``, its position, in rank order."""

    generation: int
    positions: dict[Slot, Position]


class Begin(NamedTuple):
    """All members have joined: let ``init()`` return. ``progress`` is that of the furthest."""

    generation: int
    progress: int


class Paused(NamedTuple):
    """A member has left a complete generation for the next one: work pauses until the next one begins."""

    generation: int


class TrainingOver(NamedTuple):
    """The members of a generation have ended their training: a process that is lost now is not replaced."""

    generation: int


class Dissolve(NamedTuple):
    """A member was lost before all had joined: the other members wait for an assignment again."""

    generation: int


class Start(NamedTuple):
    """Start a process in a free slot."""

    slot: Slot


class Note(NamedTuple):
    """Tell the user something about the job, in words."""

    text: str


class Fence(NamedTuple):
    """Kill the process in a slot: it does not come, and the others wait for it. ``Ended`` must follow."""

    slot: Slot
    why: str


class Silent(NamedTuple):
    """The process in a slot has been silent for some seconds: kill it if a signal has stopped it."""

    slot: Slot  # where it runs
    pid: int
    why: str  # the reason to report in that case


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


Event = Arrived | Ready | Joined | Ended | Left | Leaving | TrainingEnded | Discovered | Tick
Decision = Assign | Begin | TrainingOver | Dissolve | Paused | Note | Start | Fence | Silent | Gone | Refuse | Finish


@dataclass(frozen=True)
class Policy:
    """How the job reacts to losses and new hosts."""

    size: int  # number of ranks at the start
    minimum: int = 1  # fewest ranks to go on with
    maximum: int = 0  # most ranks; 0 means `size`
    resets: int | None = None  # number of generations after the first one; None for no limit
    # time until a host is used again after a failure of a process there, and the limit of this time, which doubles with
    # each failure. None: free slots of that host are not used again.
    cool_down_s: tuple[float, float] | None = None
    timeout_s: float = 600.0  # limit for all waiting
    start_timeout_s: float = 0.0  # limit for all waiting before the first generation; 0 means `timeout_s`
    is_discovering: bool = False  # whether `Discovered` can still bring other hosts
    spares: int = 0  # number of processes that are started beyond `maximum`, and wait to take the place of a lost one
    # whether another launcher starts the processes; then the arriving processes define slots and hosts
    is_open: bool = False

    @property
    def most(self) -> int:
        """Most ranks of a generation."""
        return self.maximum or self.size

    def limit(self, has_begun: bool) -> tuple[float, str]:
        """Return the limit for all waiting, in seconds and in words; ``has_begun``: the first generation has."""
        if has_begun or not self.start_timeout_s:
            return self.timeout_s, f"{self.timeout_s:g} s (HOROVOD_ELASTIC_TIMEOUT)"
        return self.start_timeout_s, f"{self.start_timeout_s:g} s (HOROVOD_START_TIMEOUT)"
