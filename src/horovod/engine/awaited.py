"""What callers wait for while they leave the work to the engine's thread."""

from __future__ import annotations

from horovod.engine.records import ENDED, WAITED, Record, now

__all__ = ["Awaited"]


class Awaited:
    """Records of operations, not their handles, which would keep tensors alive that nobody needs any more.

    Any thread may call anything at any moment, a signal handler too: each change is one step of a dictionary.
    """

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def add(self, record: Record) -> None:
        """Somebody waits for this operation."""
        self._records[id(record)] = record

    def remove(self, record: Record) -> None:
        """Nobody waits for it any more; needed only if it has not ended."""
        self._records.pop(id(record), None)

    def is_any(self) -> bool:
        """Whether somebody waits for what has not ended."""
        records = self._records
        if records:
            for key, record in list(records.items()):
                if not record[ENDED]:
                    return True
                records.pop(key, None)
        return False

    def waited_s(self, otherwise_s: float) -> float:
        """Return for how many seconds the first of them has waited.

        Args:
            otherwise_s: what to return if nobody does.
        """
        since = [record[WAITED] for record in list(self._records.values()) if record[WAITED] and not record[ENDED]]
        return (now() - min(since)) / 1e9 if since else otherwise_s
