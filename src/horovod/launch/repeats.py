"""Shows a traceback that several ranks raise only once, with a line that names the other ranks."""

from __future__ import annotations

from horovod.phrases import list_ranks

__all__ = ["BEGIN", "HOLD_S", "Tracebacks"]

BEGIN = b"Traceback (most recent call last):"
"""Beginning of a line after which a stream may end."""
HOLD_S = 3.0
"""Time for which a traceback is held, in case the stream ends with it; PyTorch needs a second to end."""
_MOST_BYTES = 256 << 10


class Tracebacks:
    """The tracebacks that ended the streams of a job."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._same: dict[int, list[int]] = {}

    def is_repeat(self, rank: int, text: bytes) -> bool:
        """Record the end of a stream, and return whether another stream has ended with the same text.

        Args:
            rank: rank of the stream.
            text: its end, from the beginning of the traceback.
        """
        if len(text) > _MOST_BYTES:
            return False
        first = self._first.setdefault(text, rank)
        if first != rank:
            self._same.setdefault(first, []).append(rank)
        return first != rank

    def summary(self) -> list[str]:
        """Return a line for each traceback that was shown once instead of several times."""
        return [
            f"{list_ranks(sorted(others))} ended with the same traceback as rank {first}"
            for first, others in sorted(self._same.items())
        ]
