"""A rank has left while others waited for it: what they are told."""

from __future__ import annotations

__all__ = ["LEFT", "waited_in_vain"]

LEFT = "has left the job: it called hvd.shutdown() or ended its script"
"""The text about a rank that left without failing."""
_REMEDY = (
    "If the ranks have different amounts of data, let each call hvd.join() when it is through with its own; in "
    "PyTorch, `with hvd.uneven_inputs():` around the loop does that."
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
