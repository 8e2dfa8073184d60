"""The times of one operation, for the flight recorder and the timeline.

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

#: Indices of the list: the request; when it was submitted; when a thread began to wait for it; its place in the log;
#: when its execution began and ended; how many operations were executed together; why it failed.
REQUEST, SUBMITTED, WAITED, SEQUENCE, STARTED, ENDED, TOGETHER, ERROR = range(8)

now = time.monotonic_ns


def new_ring() -> Ring:
    """Return an empty ring; a record appended to a full ring displaces the oldest."""
    return collections.deque(maxlen=CAPACITY)
