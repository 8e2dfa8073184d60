"""How this rank's script ends: the reason that is sent to ranks that still wait for it."""

from __future__ import annotations

import sys
from types import TracebackType

from horovod.core.departures import LEFT
from horovod.core.mismatch import describe_waiting
from horovod.engine import callsite
from horovod.engine.times import REQUEST, Ring
from horovod.errors import PeerLostError
from horovod.phrases import printable
from horovod.tracebacks import without_plumbing

__all__ = ["Ending"]


class Ending:
    """The reason why this rank's script ends, as far as it is known.

    Attributes:
        exception: its end by an exception, such as "ended with ValueError: bad batch at train.py:7"; or empty.
    """

    def __init__(self) -> None:
        self.exception = ""

    def note(self, error: BaseException, trace: TracebackType | None) -> None:
        """Remember an exception that ends the script; not a PeerLostError: the other ranks know that cause already."""
        if isinstance(error, PeerLostError):
            return
        own = without_plumbing(trace)
        while own is not None and own.tb_next is not None:
            own = own.tb_next
        place = f" at {own.tb_frame.f_code.co_filename}:{own.tb_lineno}" if own is not None else ""
        place *= place not in str(error)
        kind = type(error).__name__
        self.exception = printable(f"ended with {kind}: {error}{place}" if str(error) else f"ended with {kind}{place}")

    def note_last(self) -> None:
        """Remember the exception that a caller such as horovod.run has caught and printed as Python does."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self.exception:
            self.note(error, error.__traceback__)

    def reason(self, who: str, ring: Ring, is_call: bool) -> str:
        """Return why this rank leaves now.

        Args:
            who: description of this rank.
            ring: the records of its operations.
            is_call: whether ``shutdown()`` was called; then the place of the call is named.
        """
        current = sys.exc_info()[1]
        if is_call and current is not None and not self.exception:
            # An error is on its way, for example in `finally: hvd.shutdown()`.
            self.note(current, current.__traceback__)
        if self.exception:
            return f"{who} {self.exception}"
        place = callsite.here() if is_call else ""
        last = f"; its last operation was {describe_waiting(ring[-1][REQUEST])}" if ring else ""
        return f"{who} {LEFT}{' ' * bool(place)}{place}{last}"
