"""Keeps views and plans from one execution to the next.

Making arrays over the arenas, and planning with them, takes longer than moving little data. So both are kept for
operations that recur, and only for these: batches whose lengths never repeat would fill memory with useless views. So
the first execution keeps nothing. The cache is bounded: when it is full, all of it is dropped, and entries in use come
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
    """Limits the views that all keepers of a process hold together."""

    def __init__(self, most: int = _MOST_VIEWS) -> None:
        self._most = most
        self._count = 0
        self._keepers: weakref.WeakSet[CacheHolder] = weakref.WeakSet()
        self._lock = threading.RLock()

    def charge(self, keeper: CacheHolder, count: int) -> None:
        """Note that ``keeper`` is going to keep ``count`` more views."""
        with self._lock:
            self._count += count
            if self._count > self._most:
                self.forget()
                self._count = count
            self._keepers.add(keeper)

    def forget(self) -> None:
        """Let all keepers drop their views."""
        with self._lock:
            for keeper in list(self._keepers):
                keeper.forget()
            self._keepers.clear()
            self._count = 0


class Recurring:
    """Values that are made at every use until their key comes for the second time; then they are kept."""

    __slots__ = ("__weakref__", "_most", "_seen", "kept")

    def __init__(self, most: int = _MOST_SEEN) -> None:
        self._most = most
        self.kept: dict[Hashable, Any] = {}  # the kept values; `get` also makes the missing ones
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
