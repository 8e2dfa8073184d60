"""What making progress consists of: run the log, look after the other ranks, fail and leave in good order.

``Progress`` decides when; all of it runs on the engine's thread.
"""

from __future__ import annotations

import threading

from horovod import errors
from horovod.engine.answers import LEFT
from horovod.engine.liveness import Liveness, encode_reason
from horovod.engine.log import LogRunner
from horovod.engine.ports import Link, Observer

__all__ = ["Stepper"]


class Stepper:
    """See the module.

    Args:
        link: this rank's connections.
        log: what it has in flight.
        observer: is told when it fails.

    Attributes:
        failure: why this rank takes part no more, or None.
        has_news: whether ``step`` has something to do; spun on, so without a detour.
        goal: what all must have settled before ``step`` has something to do again, or 0.
    """

    def __init__(self, link: Link, log: LogRunner, observer: Observer) -> None:
        self.failure: errors.HorovodInternalError | None = None
        # A signal handler may announce, too.
        self._parting = threading.RLock()
        self._has_parted = False
        self._link = link
        self._channel, self._transport = link.channel, link.transport
        self._log = log
        self._observer = observer
        self._liveness: Liveness | None = None
        if link.peers is not None and link.board is not None:
            self._liveness = Liveness(link.rank, link.generation, link.peers, link.board, observer)
        self.has_news = log.has_news
        self.goal = log.goal

    @property
    def culprit(self) -> int:
        """The rank because of which something failed here, or -1."""
        if isinstance(self.failure, errors.PeerLostError):
            return self.failure.rank
        return self._log.culprit

    def step(self, awaited: bool) -> None:
        """Take over what was submitted and execute what the log holds; after a failure, fail what is in flight.

        Args:
            awaited: whether a thread of this rank waits for a result.
        """
        if self.failure is not None:
            self._log.fail_all(self.error)
            return
        log = self._log
        self._channel.patient = self._transport.is_awaited = awaited
        if log.inbox:
            log.accept(awaited)
        log.step()

    def tick(self, waited_s: float) -> None:
        """Look after the other ranks; raises when there is no point in waiting.

        Args:
            waited_s: for how long this rank has waited, in seconds.
        """
        if self._liveness is not None and self.failure is None:
            self._liveness.tick(self._log, self._link.channel, waited_s)
        self._link.transport.rest()

    def is_idle(self) -> bool:
        """Whether nothing is in flight, here or, at home, anywhere; and nobody is asked about a stall."""
        if not self._log.is_idle() or self._observer.is_busy:
            return False
        coordinator = self._link.coordinator
        return coordinator is None or not coordinator.is_waiting

    def abandon(self, error: BaseException) -> None:
        """Fail for good: this rank cannot keep in step with the log any more."""
        if self.failure is not None:
            return
        if not isinstance(error, errors.HorovodInternalError):
            error = errors.HorovodInternalError(f"this rank's engine failed: {error!r}")
        self.failure = error
        link = self._link
        if link.board is not None:
            link.board.give_reason(encode_reason(error, str(error)))
        self._observer.failed(error)
        if link.peers is not None:
            link.peers.fail(self.culprit)
        # What the log still says concerns this rank no more.
        self.has_news = self._log.has_submissions
        self._log.fail_all(self.error)

    def conclude(self) -> None:
        """Tell what is left to tell, while the others are still there."""
        self._observer.conclude()

    def leave(self, reason: str) -> None:
        """Take part no more, and tell the others why; what is in flight here fails."""
        link = self._link
        if self.failure is None:
            if link.coordinator is None:
                link.channel.leave(reason)
            else:
                # Who waits for this rank gets the reason through the log, before the coordinator is gone.
                self.step(awaited=False)
                link.channel.leave(reason)
                self._log.step()
            self.announce(reason)
            self.failure = errors.NotInitializedError(LEFT)
        self._log.fail_all(self.error)

    def attend(self) -> None:
        """Answer other ranks' questions."""
        try:
            self._observer.attend()
        except BaseException as error:
            self.abandon(error)

    def sweep(self) -> None:
        """Fail what was submitted too late; on any thread, once the engine's has ended."""
        self._log.fail_all(self.error)

    def announce(self, reason: str) -> None:
        """Tell the others beside the log that this rank takes part no more; on any thread.

        Blocks while the engine's thread says its last words, which has limits of its own.
        """
        link = self._link
        with self._parting:
            if self._has_parted:
                return
            if link.board is not None:
                link.board.give_reason(encode_reason(None, reason))
            if link.peers is not None:
                link.peers.leave(self.culprit)

    def close(self) -> None:
        """Release what this rank has shared with the others."""
        link = self._link
        self._observer.close()
        with self._parting:
            self._has_parted = True
            if link.board is not None:
                link.board.close()
        link.transport.close()
        if link.peers is not None:
            link.peers.close()

    def error(self) -> errors.HorovodInternalError:
        """Return the failure, as an exception of its own."""
        failure = self.failure
        assert failure is not None
        if isinstance(failure, errors.PeerLostError):
            return errors.PeerLostError(str(failure), rank=failure.rank, pid=failure.pid)
        return type(failure)(str(failure))
