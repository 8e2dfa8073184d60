"""What the log's errors are for the caller."""

from __future__ import annotations

from collections.abc import Callable

from horovod import errors
from horovod.core.departures import waited_in_vain
from horovod.core.requests import Response

__all__ = ["LEFT", "to_exception"]

#: What those are told who still wait for something when their rank leaves.
LEFT = "hvd.shutdown() was called"


def to_exception(response: Response, rank: int, describe: Callable[[], str]) -> Exception:
    """Return what a response with an error raises.

    Args:
        response: the response.
        rank: this rank.
        describe: says what waited for it.
    """
    if response.error_type == "ValueError":
        return ValueError(response.error)
    if response.error_type == "PeerLostError" and response.result == rank:
        return errors.NotInitializedError(LEFT)
    if response.error_type == "PeerLostError":
        return errors.PeerLostError(waited_in_vain(response.error, rank, describe()), rank=response.result)
    kind: type[errors.HorovodInternalError] = getattr(errors, response.error_type)
    return kind(response.error)
