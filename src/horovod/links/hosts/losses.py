"""Hosts whose connection has ended: for a moment they are not given up, since the launcher may know the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Losses", "Source"]

#: How long to ask; what is then not known will not be told.
_PATIENCE_S = 1.0


class Source(Protocol):
    """Somebody who may know what became of a rank; never blocks."""

    def news(self) -> str:
        """Return what became of it, such as "was killed by SIGKILL"; empty as long as that is not known."""

    def close(self) -> None:
        """Ask no more."""


@dataclass
class _Case:
    leader: int
    since_s: float = field(default_factory=time.monotonic)
    source: Source | None = None


class Losses:
    """See the module.

    Args:
        ask: returns who may know what became of a rank; None where nobody does.
    """

    def __init__(self, ask: Callable[[int], Source] | None) -> None:
        self._ask = ask
        self._cases: dict[int, _Case] = {}

    @property
    def is_busy(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._cases)

    def note(self, host: int, leader: int) -> None:
        """The connection with a host, and with ``leader`` there, has ended."""
        self._cases[host] = _Case(leader)

    def settled(self, is_ending: bool) -> Iterator[tuple[int, str]]:
        """Return each host that is to be given up now, and what became of its leader, or nothing.

        Args:
            is_ending: whether there is no time left.
        """
        for host, case in list(self._cases.items()):
            how = ""
            if self._ask is not None and not is_ending:
                case.source = case.source or self._ask(case.leader)
                how = case.source.news()
                if not how and time.monotonic() - case.since_s < _PATIENCE_S:
                    continue
            del self._cases[host]
            if case.source is not None:
                case.source.close()
            yield host, how
