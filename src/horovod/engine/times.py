"""The times of one operation, which the flight recorder keeps and the timeline is made of.

They are a plain list, filled in as the operation goes on, because that costs least. Times are nanoseconds of
CLOCK_MONOTONIC, which all processes of a host share, and 0 for events that have not happened.
"""

from __future__ import annotations

import collections
import time
from typing import Any

__all__ = [
    "CAPACITY",
    "ENDED",
    "ERROR",
    "REQUEST",
    "SEQUENCE",
    "STARTED",
    "SUBMITTED",
    "TOGETHER",
    "WAITED",
    "Ring",
    "Times",
    "new_ring",
    "now",
]

#: How many operations are remembered.
CAPACITY = 4096

Times = list[Any]
Ring = collections.deque[Times]

#: Places in the list: what was submitted; when; since when somebody waits for it; its place in the log; when its
#: execution began and ended; how many were executed together with it; why it failed.
REQUEST, SUBMITTED, WAITED, SEQUENCE, STARTED, ENDED, TOGETHER, ERROR = range(8)

now = time.monotonic_ns


def new_ring() -> Ring:
    """Return an empty ring; what is appended to a full one displaces the oldest."""
    return collections.deque(maxlen=CAPACITY)
