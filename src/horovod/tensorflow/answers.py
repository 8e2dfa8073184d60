"""What operations of ``QUERIES`` tell about this process."""

from __future__ import annotations

from horovod import context
from horovod.errors import RequestError

__all__ = ["answer"]


def answer(op_type: str, process_set: int) -> int:
    """Return the number that a query asks for.

    Args:
        op_type: one of ``QUERIES``.
        process_set: number of the process set.

    Raises:
        NotInitializedError: ``init()`` was not called.
        RequestError: there is no such process set.
    """
    if op_type == "HorovodProcessSetIncluded" and not context.is_initialized():
        return -1
    world = context.world()
    if op_type == "HorovodProcessSetIncluded":
        members = context.engine().sets.as_dict()
        return int(world.rank in members[process_set]) if process_set in members else -3
    if op_type == "HorovodSize":
        if process_set not in context.engine().sets:
            raise RequestError(f"size_op: process set {process_set} does not exist; was it removed?")
        return len(context.engine().sets.as_dict()[process_set])
    return {
        "HorovodRank": world.rank,
        "HorovodLocalRank": world.local_rank,
        "HorovodLocalSize": world.local_size,
    }[op_type]
