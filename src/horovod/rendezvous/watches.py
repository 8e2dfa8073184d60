"""Ends of processes that another launcher has started: one process on each host watches them and reports here."""

from __future__ import annotations

from horovod.core.membership_events import Ended, Fence, Silent, Slot
from horovod.rendezvous.generations import Generations
from horovod.rendezvous.protocol import Answers, WatchNews, WatchOrders
from horovod.rendezvous.ticks import Ticks

__all__ = ["Watches"]

#: A watch sends a message once a second and does nothing else, so after this silence its host is lost.
_SILENCE_S = 6.0
#: A watch starts with the first process of its host, and sends its first message within this time.
_START_S = 60.0
_NO_WORD = "was killed by a signal, or has crashed"


class Watches:
    """The watches of one job, without a thread or a clock."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._silent_s: dict[str, float] = {}  # by host
        self._orders: dict[Slot, Fence | Silent] = {}
        self._ticks = Ticks()
        self.is_over = False  # whether the watches may end

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
        answers.append((sender, WatchOrders(pids, kill, [n for n in orders if n not in kill], self.is_over)))
        return answers

    def order(self, order: Fence | Silent) -> None:
        """Have a process killed, or killed if it is stopped; its watch gets the order with the next answer."""
        if not isinstance(self._orders.get(order.slot), Fence):
            self._orders[order.slot] = order

    def tick(self, now_s: float) -> Answers:
        """Find lost hosts, as time has passed."""
        passed_s = self._ticks.passed_s(now_s)
        answers: Answers = []
        for slot in self._generations.processes:
            self._silent_s.setdefault(slot.host, -_START_S)
        for host in self._silent_s:
            self._silent_s[host] += passed_s
            if self._silent_s[host] >= _SILENCE_S:
                why = f"was lost with its host, which has not answered for {_SILENCE_S:g} s"
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
