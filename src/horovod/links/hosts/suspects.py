"""Hosts whose connection has ended: before they count as lost, ask the launcher briefly for the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from horovod.rendezvous.client import FateQuery

__all__ = ["Suspects"]

#: Seconds to wait for an answer; and if the job goes on without that host, so that the reason may come later.
_PATIENCE_S, _ELASTIC_S = 1.0, 0.1


@dataclass
class _Case:
    leader: int
    since_s: float = field(default_factory=time.monotonic)
    source: FateQuery | None = None


class Suspects:
    """See the module. ``ask`` asks how a rank ended; None if there is no source to ask. An elastic job goes on without
    lost hosts.
    """

    def __init__(self, ask: Callable[[int], FateQuery] | None, is_elastic: bool = False) -> None:
        self._ask = ask
        self._is_elastic = is_elastic
        self._cases: dict[int, _Case] = {}

    @property
    def is_busy(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._cases)

    def note(self, host: int, leader: int) -> None:
        """Note that the connection with a host, and with its leader, has ended."""
        self._cases[host] = _Case(leader)

    def has_ended(self, host: int, leader: int) -> bool:
        """Whether the launcher says that the leader of a host has ended; asks it, and never blocks."""
        if self._ask is None:
            return False
        case = self._cases.setdefault(host, _Case(leader))
        case.source = case.source or self._ask(leader)
        return bool(case.source.news())

    def close(self) -> None:
        """Withdraw all questions."""
        for case in self._cases.values():
            if case.source is not None:
                case.source.close()
        self._cases.clear()

    def settled(self, is_ending: bool) -> Iterator[tuple[int, str]]:
        """Return each host that now counts as lost, and how its leader ended, if that is known. ``is_ending``: return
        all hosts without waiting for answers.
        """
        limit_s = _ELASTIC_S if self._is_elastic else _PATIENCE_S
        for host, case in list(self._cases.items()):
            how = ""
            if self._ask is not None and not is_ending:
                case.source = case.source or self._ask(case.leader)
                how = case.source.news()
                if not how and time.monotonic() - case.since_s < limit_s:
                    continue
            del self._cases[host]
            if case.source is not None:
                case.source.close()
            yield host, how
