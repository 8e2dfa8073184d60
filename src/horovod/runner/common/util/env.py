"""Old import path of what the launcher left in the environment."""

from __future__ import annotations

from horovod.world import detect

__all__ = ["get_env_rank_and_size"]


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size as the launcher set them, without ``init()``; (0, 1) where there is none.

    Raises:
        InitError: the environment is contradictory.
    """
    world = detect()
    return world.rank, world.size
