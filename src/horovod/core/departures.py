"""The error text for ranks that waited for a rank that has left."""

from __future__ import annotations

__all__ = ["LEFT", "waited_in_vain"]

LEFT = "has left the job: it called hvd.shutdown() or ended its script"
"""The text about a rank that left without failing."""
_REMEDY = (
    "Look for a collective that only some ranks call, as inside `if hvd.rank() == 0:`, and call it on all ranks. If "
    "the ranks have different amounts of data, call hvd.join() after the loop, or in PyTorch loop inside "
    "`with hvd.uneven_inputs():`."
)


def waited_in_vain(reason: str, rank: int, what: str) -> str:
    """Return the error text for a rank that waited for another rank that has left.

    Args:
        reason: how the other rank ended.
        rank: the rank that waited.
        what: the operation in which it waited; empty if it waited in no particular one.
    """
    text = f"{reason.removesuffix('.')}, while rank {rank} waited in {what}" if what else reason
    return f"{text}.\n{_REMEDY}" if LEFT in reason else text
