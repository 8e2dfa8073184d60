"""Who is waited for, and for too long: warnings, and in the end an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence

from horovod.config import Config
from horovod.core.coordinator import Coordinator
from horovod.core.mismatch import describe_waiting
from horovod.engine.handles import Handle
from horovod.engine.watch import Peers
from horovod.errors import StallError

__all__ = ["StallWatch"]

_log = logging.getLogger("horovod")
#: How much longer than the coordinator a rank waits before it concludes that the coordinator is stuck, too.
_GRACE_S = 1.0


class StallWatch:
    """Keeps the time of what is pending.

    Args:
        config: warn and shutdown times.
        rank: this rank.
        peers: the other ranks; None for one rank alone.
    """

    def __init__(self, config: Config, rank: int, peers: Peers | None) -> None:
        self._rank = rank
        self._peers = peers
        off = config.stall_check_disable
        self._limit_s = 0.0 if off else config.stall_shutdown_s
        self._warn_s = 0.0 if off else config.stall_warn_s
        self._since: dict[Hashable, float] = {}
        self._warned: set[Hashable] = set()
        self._handle_since: dict[int, float] = {}

    def tick(self, coordinator: Coordinator | None, pending: Sequence[Handle], waited_s: float) -> None:
        """Warn about, or end, what has been waiting for too long.

        Raises:
            StallError: on a rank other than 0, when even the coordinator does not answer.
        """
        now = time.monotonic()
        if coordinator is not None:
            self._inspect(coordinator, now)
            return
        if not self._limit_s:
            return
        alive = {id(handle) for handle in pending}
        self._handle_since = {key: since for key, since in self._handle_since.items() if key in alive}
        for handle in pending:
            since = self._handle_since.setdefault(id(handle), now)
            if now - since > self._limit_s + _GRACE_S:
                request = handle.signature.request
                raise StallError(
                    f"{describe_waiting(request)} was submitted {now - since:.1f} s ago on rank {self._rank}, and the "
                    f"coordinator does not answer: {self._whereabouts([0])} (limit: "
                    f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._limit_s:g})"
                )

    def check_execution(self, rank: int, waited_s: float) -> None:
        """Raise when a rank does not go on with an operation that it is part of.

        Raises:
            StallError: after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
        """
        if self._limit_s and waited_s > self._limit_s:
            raise StallError(
                f"rank {self._rank} waited {waited_s:.1f} s in the middle of a collective for "
                f"{self._whereabouts([rank])} (limit: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._limit_s:g})"
            )

    def _inspect(self, coordinator: Coordinator, now: float) -> None:
        waiting = coordinator.waiting()
        keys = {key for key, *_ in waiting}
        self._since = {key: since for key, since in self._since.items() if key in keys}
        self._warned &= keys
        for key, request, present, missing in waiting:
            age = now - self._since.setdefault(key, now)
            if self._limit_s and age >= self._limit_s:
                text = self._text(request.site, describe_waiting(request), age, present, missing)
                coordinator.fail_pending(
                    key, f"{text} (limit: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._limit_s:g})", "StallError"
                )
            elif self._warn_s and age >= self._warn_s and key not in self._warned:
                self._warned.add(key)
                _log.warning(self._text(request.site, describe_waiting(request), age, present, missing))

    def _text(self, site: str, what: str, age: float, present: Sequence[int], missing: Sequence[int]) -> str:
        return (
            f"One or more tensors were submitted by a subset of ranks: {what} waits for {age:.1f} s. "
            f"Submitted by ranks {list(present)}; missing: {self._whereabouts(missing)}"
        )

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        if self._peers is None:
            return f"ranks {list(ranks)}"
        return ", ".join(
            f"{self._peers.describe(rank)}, which is {self._peers.condition(rank)}"
            if rank != self._rank
            else f"rank {rank} (this one)"
            for rank in ranks
        )
