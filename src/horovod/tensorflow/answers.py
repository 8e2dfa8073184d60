"""What operations of ``QUERIES`` tell about this process."""

from __future__ import annotations

from horovod import context

__all__ = ["answer"]


def answer(op_type: str, process_set: int) -> int:
    """Return the number that a query asks for.

    Args:
        op_type: one of ``QUERIES``.
        process_set: number of the process set.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    if op_type == "HorovodProcessSetIncluded" and not context.is_initialized():
        return -1
    world = context.world()
    if op_type == "HorovodProcessSetIncluded":
        members = context.engine().sets.as_dict()
        return int(world.rank in members[process_set]) if process_set in members else -3
    if op_type == "HorovodSize":
        return len(context.engine().sets.as_dict()[process_set]) if process_set else world.size
    return {
        "HorovodRank": world.rank,
        "HorovodLocalRank": world.local_rank,
        "HorovodLocalSize": world.local_size,
    }[op_type]
