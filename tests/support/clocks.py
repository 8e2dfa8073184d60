"""Time that counts when a test says so: what it finds must not depend on how fast the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from horovod.core.coordinator import Coordinator
from horovod.core.requests import Request
from horovod.observe.stalls import StallWatch
from horovod.rendezvous import rank_zero
from horovod.rendezvous.rank_zero import RankZero

__all__ = ["blame_only", "let_time_run_out"]


def let_time_run_out(setattr: Callable[[Any, str, Any], None]) -> None:
    """Let the start timeout of rank 0 be over as soon as it hears the first rank, however long that takes.

    Args:
        setattr: sets an attribute of an object, and back again if need be.
    """
    welcome = RankZero._welcome

    def last(host: RankZero, *args: Any) -> None:
        setattr(rank_zero, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6))
        welcome(host, *args)

    setattr(RankZero, "_welcome", last)


def blame_only(victim: int, waiting: Mapping[str, tuple[int, ...]]) -> None:
    """In a rank: nobody but ``victim`` is late, whatever the machine does to the others.

    Args:
        victim: the rank whose stall is the point.
        waiting: name and ranks of what is submitted in the end; the coordinator keeps no time before.
    """
    inspect, check_execution = StallWatch.inspect, StallWatch.check_execution
    is_complete = False

    def inspect_once_complete(watch: StallWatch, coordinator: Coordinator, position: int) -> None:
        nonlocal is_complete
        found = {request.name.partition(".")[2]: tuple(ranks) for _, request, ranks, _ in coordinator.waiting()}
        is_complete = is_complete or found == waiting
        if is_complete:
            inspect(watch, coordinator, position)

    def check_victim(watch: StallWatch, rank: int, waited_s: float, request: Request | None, sequence: int) -> None:
        if rank == victim:
            check_execution(watch, rank, waited_s, request, sequence)

    StallWatch.inspect = inspect_once_complete  # type: ignore[method-assign]
    StallWatch.check_execution = check_victim  # type: ignore[method-assign]
