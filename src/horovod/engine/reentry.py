"""Whether a thread that is about to wait would wait for itself.

Python runs finalizers wherever it collects garbage, also while a thread executes the log. What such a finalizer waits
for can never come: the thread goes on with the log only when the finalizer is through.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import CodeType

from horovod.errors import RequestError

__all__ = ["refuse_within"]

_WITHIN = (
    "a finalizer, such as __del__ or a callback of weakref, waits for a collective, but was called while its own "
    "thread executes another one, so that this would wait for ever; the operation stays in flight. Call collectives "
    "elsewhere; what does not wait, such as hvd.stats() and operations with _async, works there, too"
)


def refuse_within(owner: object, working: Collection[CodeType]) -> None:
    """See to it that the caller of this function, who is going to wait, does not have the turn.

    Args:
        owner: whose turn it is.
        working: code of those of its methods that have it, as long as their ``has_turn``, if they have that, is true.

    Raises:
        RequestError: it does.
    """
    frame = sys._getframe(1)
    while (above := frame.f_back) is not None:
        frame = above
        if frame.f_code in working:
            known = frame.f_locals
            if known.get("self") is owner and known.get("has_turn", True):
                raise RequestError(_WITHIN)
