"""Who does the work of a rank, and when it sleeps.

Whoever holds the turn runs the log. A rank has a thread of its own for it, so that communication overlaps with
computing; it sleeps in the kernel until somebody rings, and never polls. A thread that waits for a result does the
work itself where nothing can interrupt it, because to hand a small operation to another thread and back costs more
than the operation. Elsewhere, such as in a main thread with the handler of an alarm, it sleeps on a lock, and the
rank's own thread, which no signal interrupts, looks for a while before it sleeps. So whatever a handler does to a
caller, the engine goes on.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any

from horovod.engine.awaited import Awaited
from horovod.engine.handles import Handle
from horovod.engine.interrupts import Guard
from horovod.engine.pauses import Courtesy, Nap
from horovod.engine.ports import Channel, Doorbell
from horovod.engine.records import SUBMITTED, Record
from horovod.engine.reentry import refuse_within
from horovod.engine.stepper import Stepper

__all__ = ["Progress"]

_SLICE_S = 0.1
_BEHIND_SLICE_S = 0.001
#: A rank with nothing in flight is rung for whatever concerns it; and to run at all, after a pause, may take 20 ms.
_IDLE_SLICE_S = 30.0


class Progress:
    """See the module.

    Args:
        stepper: what to do.
        channel: tells whether it is to sleep only briefly.
        doorbell: lets it sleep.
        is_alone: whether there are no other ranks. Then nobody is waited for and nothing overlaps, so that work is done
            when somebody wants its result: names in flight, and ``poll``, behave as in a job of several ranks.

    Attributes:
        is_over: whether the thread has ended, or will without another look at what was submitted.
    """

    def __init__(self, stepper: Stepper, channel: Channel, doorbell: Doorbell, is_alone: bool = False) -> None:
        self._is_alone = is_alone
        self._stepper = stepper
        self._channel = channel
        self._doorbell = doorbell
        self._awaited = Awaited()
        self._is_awaited = self._awaited.is_any
        self._direct: Record | None = None
        # Whether the last one to wait could not do the work himself.
        self._hands_over = False
        self._courtesy, self._nap = Courtesy(), Nap()
        self._last_look = 0.0
        self._is_asleep = self._is_asked = self._is_concluding = False
        self._reason: str | None = None
        self.is_over = False
        self._turn = threading.Lock()
        self._guard = Guard(self._wake)
        self._begun = allocate_lock()  # taken by the thread, or by who ends what no thread has begun
        self._thread = threading.Thread(target=self._run, name="horovod-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._guard.install()
        self._thread.start()

    # -- what other threads call; they may be interrupted anywhere -----------------------------------------------

    def kick(self, handle: Handle, patient: bool) -> None:
        """See to it that what was submitted is worked on.

        Args:
            handle: the submission.
            patient: whether the caller is about to wait for it.
        """
        if not patient:
            self._courtesy.submitted_ns = handle.record[SUBMITTED]
            if self._is_asleep and not self._is_alone:
                self._wake()
            elif self._nap.is_taken:
                self._nap.end()
        elif self._guard.allows():
            self._direct = handle.record
        else:
            self._awaited.add(handle.record)
            if self._is_asleep:
                self._wake()
        if self.is_over:
            self._stepper.sweep()

    def run(self, handle: Handle, hand_in: Callable[[Handle], None], limit_s: float = math.inf) -> None:
        """Hand in a submission and block until it is done, or as ``linger`` does; do the work if that is possible."""
        guard, has_worked = self._guard, False
        if guard.allows():
            try:
                guard.enter()
                hand_in(handle)
                if self._turn.acquire(False):
                    has_worked = True
                    self._work(handle, limit_s)
            finally:
                guard.leave()
            if self.is_over:
                self._stepper.sweep()
        else:
            try:
                hand_in(handle)
            finally:
                self.kick(handle, patient=True)
        if not handle.done:
            if limit_s == math.inf:
                self.wait(handle)
            else:
                self.linger(handle, limit_s, has_worked)

    def wait(self, handle: Handle) -> None:
        """Block until ``handle`` is done; do the work meanwhile, if that is possible."""
        while self._work_if_possible(handle) and not handle.done and self._reason is None:
            pass  # a handler of a signal has had its turn, and raised nothing
        if not handle.done:
            self._wait_behind(handle)

    def _work_if_possible(self, handle: Handle, limit_s: float = math.inf) -> bool:
        """Do the work if this thread can; return whether it did."""
        guard = self._guard
        self._hands_over = not (self._direct is handle.record or guard.allows())
        if self._hands_over:
            return False
        self._direct = None
        try:
            guard.enter()
            if not self._turn.acquire(False):
                return False
            self._work(handle, limit_s)
        finally:
            guard.leave()
        return True

    def _wait_behind(self, handle: Handle) -> None:
        signal = self._hand_over(handle)
        while not handle.done:
            if not signal.acquire(True, _SLICE_S):
                if self.is_over:
                    self._stepper.sweep()
                refuse_within(self, _WORKING)

    def linger(self, handle: Handle, limit_s: float, has_worked: bool = False) -> None:
        """Wait as ``wait`` does, but for a limited time, unless that is over; what was begun is finished."""
        try:
            if not has_worked and not self._work_if_possible(handle, limit_s):
                self._hand_over(handle).acquire(True, limit_s)
        finally:
            self._awaited.remove(handle.record)
            if not handle.done:
                # The engine's thread, which may have nothing else in flight, goes on.
                self._wake()

    def _hand_over(self, handle: Handle) -> Any:
        """Let the engine's thread do the work; return the lock that it releases when ``handle`` is done."""
        signal = allocate_lock()
        signal.acquire()
        handle.waiters.append(signal)
        self._awaited.add(handle.record)
        if self._is_asleep:
            self._wake()
        elif self._nap.is_taken:
            # Last of all: it needs the interpreter, which this thread gives up in the next step.
            self._nap.end()
        return signal

    def pause(self, act: Callable[[], None]) -> None:
        """Call ``act`` at a moment at which nobody executes anything; a first Ctrl-C waits until it is over."""
        try:
            self._guard.enter()
            while not self._turn.acquire(True, _SLICE_S):
                if self.is_over:
                    return
            try:
                act()
            finally:
                self._turn.release()
        finally:
            self._guard.leave()

    def look(self) -> None:
        """Let the engine look now whether something is done that nobody waits for."""
        self._is_asked = True
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
        self._guard.remove()
        if self._begun.acquire(False):
            self._end()
        if self._thread.ident is None:
            return True
        self._wake()
        self._thread.join(timeout_s)
        while self._is_concluding:
            # What it has to tell takes as long as it takes, within limits of its own.
            self._thread.join(_SLICE_S)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        # What it rings through is gone when the engine has ended.
        with contextlib.suppress(ValueError):
            self._doorbell.ring()

    # -- the work ------------------------------------------------------------------------------------------------

    def _work(self, handle: Handle, limit_s: float = math.inf) -> None:
        """Do the work until ``handle`` is done, or for so long; the caller has the turn, and gives it up here."""
        doorbell, stepper, guard = self._doorbell, self._stepper, self._guard
        last_look = started = 0.0
        heard, has_turn = -1, True
        try:
            doorbell.awake()
            while True:
                heard = doorbell.heard()
                stepper.step(awaited=True)
                if handle.done or guard.is_pending or self._reason is not None:
                    break
                if self._look():
                    continue
                doorbell.ring_deferred()
                seen = doorbell.heard()
                doorbell.announce(stepper.goal())
                if not stepper.has_news():
                    slice_s = _BEHIND_SLICE_S if self._channel.is_behind() else _SLICE_S
                    doorbell.sleep(seen, min(slice_s, limit_s), parked=False)
                doorbell.awake()
                clock = time.monotonic()
                started = started or clock
                if clock - started >= limit_s:
                    break
                if clock - last_look >= _SLICE_S:
                    last_look = clock
                    stepper.tick(clock - started)
        except BaseException as error:
            stepper.abandon(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            doorbell.park()
            doorbell.ring_deferred()
            has_turn = False  # noqa: F841  read by ``refuse_within``
            self._turn.release()
            if self._reason is not None or self._is_awaited() or (doorbell.heard() != heard and stepper.has_news()):
                # Who rang in between found this rank awake, and another thread may have left its work to this one; the
                # rank's own thread has to be told.
                self._wake()

    def _run(self) -> None:
        doorbell, stepper = self._doorbell, self._stepper
        if not self._begun.acquire(False):
            return  # start() was interrupted, and the job left
        self._last_look = time.monotonic()
        while self._reason is None:
            if self._is_alone and not self._await_question():
                continue
            if doorbell.share == 1 and not self._is_awaited():
                self._courtesy.wait(lambda: self._is_awaited() or self._reason is not None)
            heard = doorbell.heard()
            slice_s = _SLICE_S
            if self._turn.acquire(False):
                try:
                    slice_s = self._take_turn(heard)
                except BaseException as error:
                    stepper.abandon(error)
                finally:
                    self._turn.release()
            if slice_s:
                self._is_asleep = True
                # Who has come since the last step saw this thread awake, and so did not ring.
                if not stepper.has_news() and self._reason is None and not self._is_awaited():
                    doorbell.sleep(heard, slice_s, parked=True)
                elif self._turn.locked():
                    # Somebody who waits does it.
                    doorbell.sleep(heard, _SLICE_S, parked=True)
                self._is_asleep = False
                if not stepper.has_news():
                    # It was rung for something else.
                    stepper.attend()
        self._turn.acquire()
        self._end()

    def _await_question(self) -> bool:
        """Sleep until somebody looks or waits; False if that has not happened yet."""
        heard = self._doorbell.heard()
        self._is_asleep = True
        if not self._is_asked and not self._is_awaited() and self._reason is None:
            self._doorbell.sleep(heard, _IDLE_SLICE_S, parked=True)
        self._is_asleep = False
        is_asked, self._is_asked = self._is_asked, False
        return is_asked or self._is_awaited()

    def _take_turn(self, heard: int) -> float:
        """Do what there is to do; return for how long the thread may sleep, or 0 if it has slept."""
        doorbell, stepper = self._doorbell, self._stepper
        doorbell.awake()
        is_awaited = self._is_awaited()
        stepper.step(is_awaited)
        if self._is_awaited() and self._look():
            return 0
        clock = time.monotonic()
        has_looked = clock - self._last_look >= _SLICE_S
        if has_looked:
            self._last_look = clock
            stepper.tick(self._awaited.waited_s(_SLICE_S))
        came = self._hands_over and is_awaited and not self._is_awaited()
        if came and self._nap.take(lambda: stepper.has_news() or self._reason is not None):
            return 0
        slice_s = _BEHIND_SLICE_S if self._channel.is_behind() else _SLICE_S
        doorbell.ring_deferred()
        if self._is_awaited():
            doorbell.announce(stepper.goal())
            self._is_asleep = True
            if not stepper.has_news() and self._reason is None:
                doorbell.sleep(heard, slice_s, parked=False)
            self._is_asleep = False
            return 0
        doorbell.park()
        # Only who has just looked may sleep for long: it may have been rung for what that shows.
        return _IDLE_SLICE_S if has_looked and slice_s == _SLICE_S and stepper.is_idle() else slice_s

    def _look(self) -> bool:
        """Look for what a caller waits for, for a while; True if it has come."""
        has_news, doorbell = self._stepper.has_news, self._doorbell
        for _ in doorbell.looks():
            if has_news():
                doorbell.succeeded()
                return True
        return False

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


_WORKING = [one.__code__ for one in (Progress._work, Progress._take_turn, Progress.pause)]
