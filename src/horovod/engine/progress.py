"""The engine's thread: when it works, when it looks, when it sleeps.

It does all the work of its rank. Threads that submit hand it something and go on; threads that wait sleep on a lock,
without the GIL, so that it can run. Signals interrupt only Python's main thread, never this one: whatever they do to a
caller, the engine goes on.

While a thread waits, this one looks for a while before it sleeps; else it sleeps in the kernel until somebody rings,
so that communication overlaps with computing, and nothing polls. On the caller's only core it does not interrupt a
caller who submits one operation after the other (to take turns made fifty allreduces of 1 MiB a fifth slower).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from _thread import allocate_lock
from typing import Any

from horovod.engine.handles import Handle
from horovod.engine.ports import Channel, Doorbell
from horovod.engine.records import ENDED, SUBMITTED, WAITED, Record, now
from horovod.engine.stepper import Stepper

__all__ = ["Progress"]

_SLICE_S = 0.1
_BEHIND_SLICE_S = 0.001
#: A rank with nothing in flight is rung for whatever concerns it; and to run at all, after a pause, may take 20 ms.
_IDLE_SLICE_S = 30.0
#: A caller that has submitted nothing for so long does something else now; and how often to wait for that.
_QUIET_S, _PAUSES = 0.0005, 40
#: Who calls one operation after the other comes back within that; to wake a thread that naps costs least.
_NAP_S = 0.0002


class Progress:
    """See the module.

    Args:
        stepper: what to do.
        channel: tells whether it is to sleep only briefly.
        doorbell: lets it sleep.

    Attributes:
        is_over: whether the thread has ended, or will without another look at what was submitted.
    """

    def __init__(self, stepper: Stepper, channel: Channel, doorbell: Doorbell) -> None:
        self._stepper = stepper
        self._channel = channel
        self._doorbell = doorbell
        # Not the handle, which would keep tensors alive that nobody needs any more.
        self._awaited: Record | None = None
        self._submitted_ns = 0
        self._is_asleep = self._is_napping = self._is_concluding = False
        self._nap = allocate_lock()
        self._nap.acquire()
        self._reason: str | None = None
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name="horovod-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # -- what other threads call; they may be interrupted anywhere -----------------------------------------------

    def kick(self, handle: Handle, patient: bool) -> None:
        """See to it that what was submitted is worked on.

        Args:
            handle: the submission.
            patient: whether the caller is about to wait for it.
        """
        if patient:
            self._awaited = handle.record
        else:
            self._submitted_ns = handle.record[SUBMITTED]
        if self._is_asleep:
            self._wake()
        elif self._is_napping and not patient:
            self._end_nap()
        if self.is_over:
            self._stepper.sweep()

    def wait(self, handle: Handle) -> None:
        """Block until ``handle`` is done."""
        signal = self._signal_of(handle)
        self._awaited = handle.record
        if self._is_asleep:
            self._wake()
        elif self._is_napping:
            # Last of all: it needs the interpreter, which this thread gives up in the next step.
            self._end_nap()
        while not handle.done:
            if signal.acquire(True, _SLICE_S):
                # Others may wait for the same.
                signal.release()
                continue
            # Another thread may have waited for something else meanwhile, and got it.
            self._awaited = handle.record
            if self.is_over:
                self._stepper.sweep()

    def linger(self, handle: Handle, limit_s: float) -> None:
        """Wait as ``wait`` does, but for a limited time."""
        self._signal_of(handle).acquire(True, limit_s)
        self._awaited = None

    def look(self) -> None:
        """Let the engine look now whether something is done that nobody waits for."""
        if self._is_asleep:
            self._wake()
        # It needs the interpreter, which a caller that polls in a loop would keep for itself.
        time.sleep(0)

    def stop(self, reason: str, timeout_s: float) -> bool:
        """Leave the job; False if the thread did not end in time, because it waits for a peer.

        Args:
            reason: what those are told who wait for this rank.
            timeout_s: seconds, at most.
        """
        if self._reason is None:
            self._reason = reason
        if self._thread.ident is None:
            self._end()
            return True
        self._wake()
        self._thread.join(timeout_s)
        while self._is_concluding:
            # What it has to tell takes as long as it takes, within limits of its own.
            self._thread.join(_SLICE_S)
        return not self._thread.is_alive()

    @staticmethod
    def _signal_of(handle: Handle) -> Any:
        signal = handle.waiter
        if signal is None:
            signal = allocate_lock()
            signal.acquire()
            handle.waiter = signal
        return signal

    def _end_nap(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._nap.release()

    def _wake(self) -> None:
        # What it rings through is gone when the engine has ended.
        with contextlib.suppress(ValueError):
            self._doorbell.ring()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        doorbell, stepper = self._doorbell, self._stepper
        last_look = time.monotonic()
        while self._reason is None:
            heard = doorbell.heard()
            slice_s = _SLICE_S
            try:
                is_awaited = self._is_awaited()
                if not is_awaited and doorbell.share == 1:
                    self._let_the_caller_submit()
                stepper.step(is_awaited)
                if self._is_awaited() and self._look():
                    continue
                clock = time.monotonic()
                has_looked = clock - last_look >= _SLICE_S
                if has_looked:
                    last_look = clock
                    stepper.tick(self._waited_s())
                if is_awaited and not self._is_awaited() and self._take_nap():
                    continue
                if self._channel.is_behind():
                    slice_s = _BEHIND_SLICE_S
                elif has_looked and stepper.is_idle():
                    # Only who has just looked may sleep for long: it may have been rung for what that shows.
                    slice_s = _IDLE_SLICE_S
                self._sleep(heard, slice_s)
                if not stepper.has_news():
                    # It was rung for something else.
                    stepper.attend()
            except BaseException as error:
                stepper.abandon(error)
        self._end()

    def _look(self) -> bool:
        """Look for what a caller waits for, for a while; True if it has come."""
        has_news, doorbell = self._stepper.has_news, self._doorbell
        for _ in doorbell.looks():
            if has_news():
                doorbell.succeeded()
                return True
        return False

    def _take_nap(self) -> bool:
        """Wait for a caller that is likely to come back at once; True if it has.

        Other ranks see this one awake, and do not ring: they are heard at the end of the nap.
        """
        self._is_napping = True
        came = self._stepper.has_news() or self._reason is not None or self._nap.acquire(True, _NAP_S)
        self._is_napping = False
        return came

    def _sleep(self, heard: int, timeout_s: float) -> None:
        """Sleep until somebody rings; not at all if something has happened since ``heard``."""
        doorbell = self._doorbell
        doorbell.insist()
        is_awaited = self._is_awaited()
        if is_awaited:
            doorbell.announce(self._stepper.goal())
        else:
            doorbell.park()
        self._is_asleep = True
        # Who has come since the last step saw this thread awake, and so did not ring.
        if not self._stepper.has_news() and self._reason is None and (is_awaited or not self._is_awaited()):
            doorbell.sleep(heard, timeout_s, parked=not is_awaited)
        self._is_asleep = False
        doorbell.awake()

    def _is_awaited(self) -> bool:
        awaited = self._awaited
        return awaited is not None and not awaited[ENDED]

    def _waited_s(self) -> float:
        awaited = self._awaited
        return (now() - awaited[WAITED]) / 1e9 if awaited is not None and awaited[WAITED] else _SLICE_S

    def _let_the_caller_submit(self) -> None:
        """Pause while the caller, who has no other core, submits one operation after the other."""
        for _ in range(_PAUSES):
            left = _QUIET_S - self._quiet_s()
            if left <= 0 or self._is_awaited() or self._reason is not None:
                return
            time.sleep(left)

    def _quiet_s(self) -> float:
        """Return how long ago the caller has submitted what it does not wait for."""
        submitted = self._submitted_ns
        return (now() - submitted) / 1e9 if submitted else math.inf

    def _end(self) -> None:
        stepper = self._stepper
        try:
            self._is_concluding = True
            stepper.conclude()
            self._is_concluding = False
            stepper.leave(self._reason or "")
        except BaseException as error:
            self._is_concluding = False
            stepper.abandon(error)
        self.is_over = True
        stepper.sweep()
        stepper.close()
