"""Connects ``core.membership`` with the processes of one job: identifies each process, and answers it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod.core.membership import Membership
from horovod.core.membership_events import (
    Arrived,
    Assign,
    Begin,
    Decision,
    Discovered,
    Dissolve,
    Ended,
    Event,
    Fence,
    Gone,
    Joined,
    Leaving,
    Left,
    Policy,
    Ready,
    Refuse,
    Silent,
    Slot,
    Tick,
    TrainingEnded,
)
from horovod.rendezvous.protocol import (
    Answers,
    Fate,
    MemberNews,
    MemberPlace,
    MemberStatus,
    Refused,
    WatchNews,
    WatchOrders,
)
from horovod.rendezvous.waiting import Ticks

__all__ = ["Generations", "Watches"]

#: Number of latest generations whose ranks' endings are kept: some processes may still be in an earlier one.
_KEPT = 8
#: A process sends a message each second. After this silence the launcher checks, repeatedly, whether it is stopped.
_SILENCE_S, _AGAIN_S = 5.0, 1.0
#: A watch sends a message once a second and does nothing else, so after this silence its host is lost.
_HOST_SILENCE_S = 6.0
#: A watch starts with the first process of its host, and sends its first message within this time.
_START_S = 60.0
_NO_WORD = "was killed by a signal, or has crashed"


@dataclass
class _Process:
    """A process that has reported itself; ``answer`` is the answer to its last attempt."""

    nonce: bytes
    pid: int
    sender: bytes
    silent_s: float = 0.0
    attempt: int = 0
    answer: MemberPlace | Refused | None = None
    wants_out: bool = False
    last_words: str | None = None  # None: it has not said that it ends


class Generations:
    """The generations of one job, without a thread or a clock."""

    def __init__(self, policy: Policy) -> None:
        self._membership, self._is_open = Membership(policy), policy.is_open
        self._may_spread = policy.is_discovering
        self._decisions: list[Decision] = []
        self._processes: dict[Slot, _Process] = {}
        self._ranks: dict[int, dict[Slot, int]] = {}  # ranks of the living processes, by generation
        self._fates: dict[int, dict[int, str]] = {}  # by generation and rank
        self._placed: frozenset[Slot] = frozenset()  # in the latest generation, which may not have begun
        self._begun, self._size, self._wants_change = 0, policy.size, False
        self._ticks = Ticks()
        self._buried: set[bytes] = set()  # nonces of ended processes: messages of a host that was cut off may come late
        self.progress = 0  # the largest progress that any process has reported

    @property
    def oldest(self) -> int:
        """The oldest generation of which ranks are still known."""
        return min(self._ranks, default=0)

    @property
    def is_awaited(self) -> bool:
        """Whether a living process has called ``init()``."""
        return any(process.attempt for process in tuple(self._processes.values()))

    def hear(self, sender: bytes, news: MemberNews) -> Answers:
        """Handle a message of a process."""
        slot = Slot(news.host, news.number)
        process = self._processes.get(slot)
        if news.nonce in self._buried:
            return []
        if process is None or process.nonce != news.nonce:
            if process is None and self._is_open and news.verb == "here" and not self._membership.is_open(slot):
                self.handle(Arrived(slot))
            if why := self._objection(slot, news):
                return [(sender, Refused(news.attempt, why, False))]
            process = self._processes[slot] = _Process(news.nonce, news.pid, sender)
        process.sender, process.silent_s = sender, -math.inf if news.verb == "left" else 0.0
        self.progress = max(self.progress, news.progress)
        answers: Answers = []
        if news.wants_out and not process.wants_out:
            process.wants_out = True
            answers += self.handle(Leaving(slot))
        if news.verb == "ready" and news.attempt > process.attempt:
            process.attempt, process.answer = news.attempt, None
            answers += self.handle(Ready(slot, news.progress, news.digest))
        elif news.verb == "joined":
            answers += self.handle(Joined(slot, news.generation))
        elif news.verb == "done":
            answers += self.handle(TrainingEnded(slot))
        elif news.verb == "left":
            process.last_words = news.how
            answers += self.handle(Left(slot))
        if news.attempt == process.attempt and process.answer is not None and not answers:
            # The answer may have been lost, also if the process has joined a generation that was dissolved since.
            answers.append((sender, process.answer))
        return [*answers, (sender, self._status(slot))]

    def _objection(self, slot: Slot, news: MemberNews) -> str:
        """Return why an unknown process may not speak for a slot; empty when it may."""
        if not self._membership.is_open(slot):
            return f"slot {slot} belongs to another process, or none was started there"
        # The first message of a process is "here", from init(); it sends others only after an answer.
        return "" if news.verb == "here" else f"slot {slot} has another process now"

    def handle(self, event: Event) -> Answers:
        """Handle one event."""
        answers: Answers = []
        if isinstance(event, Ended):
            answers += self._bury(event)
        elif isinstance(event, Discovered):
            self._may_spread |= len(event.hosts) > 1
        elif isinstance(event, Tick):
            self._notice_silence(event.now_s)
        for decision in self._membership.handle(event):
            if isinstance(decision, Refuse):
                answers += self._answer(decision.slot, Refused(0, decision.why, decision.is_dismissal))
                continue
            self._decisions.append(decision)
            if isinstance(decision, Assign):
                answers += self._assign(decision)
            elif isinstance(decision, Begin):
                self._begun, self._size = decision.generation, len(self._ranks[decision.generation])
                answers += self._tell_all()
            elif isinstance(decision, Dissolve):
                for slot in self._placed & self._processes.keys():
                    self._processes[slot].answer = None  # must not be sent again
                self._placed = frozenset()
                answers += self._tell_all()
        if self._membership.wants_change != self._wants_change:
            self._wants_change = not self._wants_change
            answers += self._tell_all()
        return answers

    @property
    def processes(self) -> dict[Slot, tuple[int, str | None]]:
        """Process id of each known process, and its last words if it has said that it ends."""
        return {slot: (process.pid, process.last_words) for slot, process in self._processes.items()}

    def take(self) -> list[Decision]:
        """Return the decisions for the launcher since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def fate(self, rank: int, generation: int) -> Fate:
        """Return how a rank of a generation ended, as far as that is known."""
        return Fate(rank, self._fates.get(generation, {}).get(rank, ""), generation)

    def _assign(self, assign: Assign) -> Answers:
        number, positions = assign
        self._ranks[number] = {slot: position.rank for slot, position in positions.items()}
        self._fates[number] = {}
        for old in [old for old in self._ranks if old <= number - _KEPT]:
            del self._ranks[old], self._fates[old]
        self._placed = frozenset(positions)
        behind = [position.rank for position in positions.values() if position.is_behind]
        previous = [position.previous for position in positions.values()]
        answers: Answers = []
        for slot, at in positions.items():
            place = MemberPlace(
                0, number, at.rank, len(positions), at.local_rank, at.local_size, at.cross_rank, at.cross_size,
                behind, previous,
            )  # fmt: skip
            answers += self._answer(slot, place)
        return answers

    def _answer(self, slot: Slot, answer: MemberPlace | Refused) -> Answers:
        """Answer the last attempt of the process in a slot."""
        process = self._processes.get(slot)
        if process is None:
            return []
        answer.attempt = process.attempt
        process.answer = answer
        return [(process.sender, answer)]

    def _bury(self, event: Ended) -> Answers:
        """Record the end of a process for its ranks; if it did not end well, tell the current members."""
        if (process := self._processes.pop(event.slot, None)) is not None:
            self._buried.add(process.nonce)
            if self._is_open:
                self._decisions.append(Gone(event.slot, process.pid, event.how))
        answers: Answers = []
        for number, ranks in self._ranks.items():
            rank = ranks.pop(event.slot, None)
            if rank is not None and event.how:
                self._fates[number][rank] = event.how
                if number == self._membership.generation:
                    fate = Fate(rank, event.how, number)
                    answers += [(self._processes[slot].sender, fate) for slot in ranks if slot in self._processes]
        return answers

    def _notice_silence(self, now_s: float) -> None:
        passed_s = self._ticks.passed_s(now_s)
        for slot, process in self._processes.items():
            process.silent_s += passed_s
            if process.silent_s >= _SILENCE_S:
                process.silent_s -= _AGAIN_S
                why = f"it was stopped (such as by SIGSTOP) and had not answered for {_SILENCE_S:g} s"
                self._decisions.append(Silent(slot, process.pid, why))

    def _status(self, slot: Slot) -> MemberStatus:
        placed = self._membership.generation if slot in self._placed else 0
        may_spread = self._may_spread or any(other.host != slot.host for other in self._processes)
        return MemberStatus(placed, self._begun, self._size, self._wants_change, may_spread)

    def _tell_all(self) -> Answers:
        return [(process.sender, self._status(slot)) for slot, process in self._processes.items()]


class Watches:
    """Ends of processes that another launcher has started: one process on each host watches them, and reports here."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._silent_s: dict[str, float] = {}  # by host
        self._orders: dict[Slot, Fence | Silent] = {}
        self._ticks = Ticks()
        self._is_over = False  # whether the watches may end

    def hear(self, sender: bytes, news: WatchNews) -> Answers:
        """Handle a message of a watch."""
        self._silent_s[news.host] = 0.0
        answers: Answers = []
        for number in news.ended:
            answers += self._end(Slot(news.host, number), _NO_WORD)
        own = {slot: pid for slot, (pid, _) in self._generations.processes.items() if slot.host == news.host}
        orders = {slot.number: order for slot, order in self._orders.items() if slot in own}
        kill = [number for number, order in orders.items() if isinstance(order, Fence)]
        pids = [(slot.number, pid) for slot, pid in own.items()]
        answers.append((sender, WatchOrders(pids, kill, [n for n in orders if n not in kill], self._is_over)))
        return answers

    def order(self, order: Fence | Silent | None) -> Answers:
        """Have a process killed, or killed if it is stopped, or (None) let all watches end, with their next answers."""
        if order is None:
            self._is_over = True
        elif not isinstance(self._orders.get(order.slot), Fence):
            self._orders[order.slot] = order
        return []

    def tick(self, now_s: float) -> Answers:
        """Find lost hosts, as time has passed."""
        passed_s = self._ticks.passed_s(now_s)
        answers: Answers = []
        for slot in self._generations.processes:
            self._silent_s.setdefault(slot.host, -_START_S)
        for host in self._silent_s:
            self._silent_s[host] += passed_s
            if self._silent_s[host] >= _HOST_SILENCE_S:
                why = f"was lost with its host, which has not answered for {_HOST_SILENCE_S:g} s"
                for slot in [slot for slot in self._generations.processes if slot.host == host]:
                    answers += self._end(slot, why)
        return answers

    def _end(self, slot: Slot, how: str) -> Answers:
        pid, last_words = self._generations.processes.get(slot, (0, None))
        if not pid:
            return []  # reported before
        order = self._orders.pop(slot, None)
        # A watch on a lost host has not looked whether a process was stopped.
        if isinstance(order, Fence) or (order is not None and how == _NO_WORD):
            how = f"was killed: {order.why}"
        return self._generations.handle(Ended(slot, how if last_words is None else last_words))
