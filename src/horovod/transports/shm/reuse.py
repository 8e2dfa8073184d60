"""Views and plans that are kept from one execution to the next, and for how long.

To make arrays over the arenas, and to plan with them, takes longer than to move little data. So both are kept for what
comes again; and only for that, since batches whose lengths never repeat would fill memory with what nobody needs: the
first time nothing is kept. The cache is bounded: when it is full, all of it is dropped, and entries in use come
back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

__all__ = ["Budget", "Recurring"]

#: A view of a tensor takes about a kilobyte.
_MOST_VIEWS = 8192
_MOST_SEEN = 1024

T = TypeVar("T")


class CacheHolder(Protocol):
    """An object that keeps views."""

    def forget(self) -> None:
        """Keep nothing any more; may be called by another thread at any time."""


class Budget:
    """How many views all keepers of a process may hold together.

    Args:
        most: that many.
    """

    def __init__(self, most: int = _MOST_VIEWS) -> None:
        self._most = most
        self._count = 0
        self._keepers: weakref.WeakSet[CacheHolder] = weakref.WeakSet()
        self._lock = threading.Lock()

    def charge(self, keeper: CacheHolder, count: int) -> None:
        """Take note that ``keeper`` is going to keep ``count`` more."""
        with self._lock:
            self._count += count
            if self._count > self._most:
                for other in list(self._keepers):
                    other.forget()
                self._keepers.clear()
                self._count = count
            self._keepers.add(keeper)


class Recurring:
    """Values that are made at every use until their key comes for the second time; then they are kept.

    Args:
        most: how many are kept at most.

    Attributes:
        kept: those that are kept; ``get`` also makes what is not.
    """

    __slots__ = ("__weakref__", "_most", "_seen", "kept")

    def __init__(self, most: int = _MOST_SEEN) -> None:
        self._most = most
        self.kept: dict[Hashable, Any] = {}
        self._seen: set[Hashable] = set()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of ``key``."""
        value = self.kept.get(key)
        if value is None:
            value = make()
            if key not in self._seen:
                if len(self._seen) >= self._most:
                    self._seen.clear()
                self._seen.add(key)
            else:
                if len(self.kept) >= self._most:
                    self.kept.clear()
                self.kept[key] = value
        return value

    def forget(self) -> None:
        """Keep nothing any more."""
        self.kept.clear()
        self._seen.clear()
