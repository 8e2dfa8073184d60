"""What making progress consists of: run the log, look after the other ranks, and fail in good order.

``Progress`` decides which thread does it and when; all of it but ``attend`` is called with its lock held.
"""

from __future__ import annotations

import math

from horovod import errors
from horovod.engine.liveness import Liveness, encode_reason
from horovod.engine.log import LogRunner
from horovod.engine.ports import Link, Observer
from horovod.engine.records import SUBMITTED, WAITED, Ring, now

__all__ = ["Stepper"]


class Stepper:
    """See the module.

    Args:
        link: this rank's connections.
        log: what it has in flight.
        ring: the records of its operations.
        observer: is told when it fails.

    Attributes:
        failure: why this rank takes part no more, or None.
        has_news: whether ``step`` has something to do; spun on, so without a detour.
        goal: what all must have settled before ``step`` has something to do again, or 0.
        attend: answers other ranks' questions; called without the lock.
    """

    def __init__(self, link: Link, log: LogRunner, ring: Ring, observer: Observer) -> None:
        self.failure: errors.HorovodInternalError | None = None
        self._link = link
        self._log = log
        self._ring = ring
        self._observer = observer
        self._liveness: Liveness | None = None
        if link.peers is not None and link.board is not None:
            self._liveness = Liveness(link.rank, link.generation, link.peers, link.board, observer)
        self.has_news = log.has_news
        self.goal = log.goal
        self.attend = observer.attend

    @property
    def culprit(self) -> int:
        """The rank because of which something failed here, or -1."""
        if isinstance(self.failure, errors.PeerLostError):
            return self.failure.rank
        return self._log.culprit

    def step(self) -> None:
        """Execute what the log holds; after a failure, fail what is in flight."""
        if self.failure is None:
            self._log.step()
        else:
            self._log.fail_all(self.error)

    def tick(self, waited_s: float) -> None:
        """Look after the other ranks; raises when there is no point in waiting.

        Args:
            waited_s: for how long this rank has waited, in seconds.
        """
        if self._liveness is not None and self.failure is None:
            self._liveness.tick(self._log, self._link.channel, waited_s)

    def is_idle(self) -> bool:
        """Whether nothing is in flight, here or, at home, anywhere; and nobody is asked about a stall."""
        if not self._log.is_idle() or self._observer.is_busy:
            return False
        coordinator = self._link.coordinator
        return coordinator is None or not coordinator.is_waiting

    def quiet_s(self) -> float:
        """Return how long ago the caller has submitted what it does not wait for."""
        last = self._ring[-1] if self._ring else None
        return math.inf if last is None or last[WAITED] else (now() - last[SUBMITTED]) / 1e9

    def abandon(self, error: BaseException) -> None:
        """Fail for good: this rank cannot keep in step with the log any more."""
        if self.failure is not None:
            return
        if not isinstance(error, errors.HorovodInternalError):
            error = errors.HorovodInternalError(f"this rank's engine was interrupted: {error!r}")
        self.failure = error
        link = self._link
        if link.board is not None:
            link.board.give_reason(encode_reason(error, str(error)))
        self._observer.failed(error)
        if link.peers is not None:
            link.peers.fail(self.culprit)
        self._log.fail_all(self.error)

    def leave(self, reason: str) -> None:
        """Tell the others why this rank takes part no more."""
        link = self._link
        if link.board is not None:
            link.board.give_reason(encode_reason(None, reason))
        if link.peers is not None:
            link.peers.leave(self.culprit)

    def end(self) -> None:
        """Fail what is still in flight: this rank has left."""
        if self.failure is None:
            self.failure = errors.NotInitializedError("hvd.shutdown() was called")
        self._log.fail_all(self.error)

    def error(self) -> errors.HorovodInternalError:
        """Return the failure, as an exception of its own."""
        failure = self.failure
        assert failure is not None
        if isinstance(failure, errors.PeerLostError):
            return errors.PeerLostError(str(failure), rank=failure.rank, pid=failure.pid)
        return type(failure)(str(failure))
