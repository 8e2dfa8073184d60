"""A rank has left while others waited for it: what they are told."""

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
    """Return what a rank raises because it waited for another one that is gone.

    Args:
        reason: how that one ended.
        rank: the rank that waited.
        what: the operation that it waited in; empty if it waited for nothing in particular.
    """
    text = f"{reason.removesuffix('.')}, while rank {rank} waited in {what}" if what else reason
    return f"{text}.\n{_REMEDY}" if LEFT in reason else text
