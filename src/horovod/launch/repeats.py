"""An error that all ranks raise is one error: its traceback is shown once, with a line that says of whom it is, too."""

from __future__ import annotations

from horovod.phrases import list_ranks

__all__ = ["BEGIN", "HOLD_S", "Tracebacks"]

BEGIN = b"Traceback (most recent call last):"
"""How a line begins after which a stream may end."""
HOLD_S = 3.0
"""For how long a traceback is kept back, in case that the stream ends with it; PyTorch needs a second to end."""
_MOST_BYTES = 256 << 10


class Tracebacks:
    """With what the streams of a job have ended."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._same: dict[int, list[int]] = {}

    def is_repeat(self, rank: int, text: bytes) -> bool:
        """Take note of how a stream ended, and return whether another one has ended with the same words.

        Args:
            rank: whose stream it was.
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
