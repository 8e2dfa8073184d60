"""What is said when something is used wrongly: what was done, where, on which rank, and what to do."""

from __future__ import annotations

from horovod import context
from horovod.engine import callsite
from horovod.errors import OptimizerUseError, RequestError

__all__ = ["changed_gradient", "out_of_turn", "wrong_argument"]


def wrong_argument(text: str) -> RequestError:
    """Return the error for an argument that does not fit; the caller's line is added."""
    place = callsite.here(1)
    return RequestError(f"{text} ({place})" if place else text)


def out_of_turn(what: str, instead: str) -> OptimizerUseError:
    """Return the error for gradients that were touched at the wrong moment.

    Args:
        what: what was done; rank and line are added.
        instead: what to do next, as a sentence.
    """
    where = ", ".join(filter(None, (f"rank {context.world().rank}", callsite.here(1))))
    return OptimizerUseError(f"{what} ({where}). {instead}")


def changed_gradient(name: str) -> OptimizerUseError:
    """Return the error for a gradient that was changed while it was not the caller's."""
    return out_of_turn(
        f"the gradient of {name} was changed after backward() had handed it to the other ranks",
        "To clip or unscale gradients, call optimizer.synchronize() first, and then optimizer.step() inside "
        "`with optimizer.skip_synchronize():`.",
    )
