"""The engine's thread, the turn, and the sleep of threads.

The thread that has the *turn* runs the log. The engine has its own thread for this, so that communication overlaps
with computing. This thread sleeps in the kernel until its doorbell rings, and never polls. A thread that waits for a
result does the work itself if nothing can interrupt it, because handing a small operation to another thread and back
costs more than the operation. Otherwise, for example in a main thread with an alarm handler, it sleeps on a lock, and
the engine's thread does the work, because no signal interrupts it. So the engine makes progress in any case.

Python runs finalizers wherever it collects garbage, also while a thread executes the log. A finalizer that waits there
would wait for its own thread; it gets an error.
"""

from __future__ import annotations

import math
import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from typing import Any

from horovod.engine.execution import Execution
from horovod.engine.handles import Handle
from horovod.engine.link import Link
from horovod.engine.signals import DeferredSignals
from horovod.engine.state import ThreadWait
from horovod.engine.times import SUBMITTED, now
from horovod.errors import HorovodInternalError, RequestError

__all__ = ["Loop"]

#: Seconds of sleep: between two checks of the other ranks; while records wait for a slow reader; and while nothing is
#: in flight, because then the doorbell rings for everything that concerns this rank.
_LOOK_S, _BEHIND_S, _IDLE_S = 0.1, 0.001, 30.0
#: Seconds without a submission after which a thread counts as doing other work; and how often to wait for that.
_QUIET_S, _PAUSES = 0.0005, 40
_WITHIN = (
    "a finalizer (__del__ or a callback of weakref) waits for a collective while its own thread executes another "
    "one: this would wait for ever. The operation stays in flight. Call collectives outside finalizers; calls that do "
    "not wait, for example hvd.stats() and operations with _async, work there, too"
)


class Loop:
    """See the module.

    Args:
        execution: the work.
        link: this rank's connections. A rank alone works only when a thread wants a result, so that names in flight
            and ``poll`` behave as in a job of several ranks.
    """

    def __init__(self, execution: Execution, link: Link) -> None:
        self._execution = execution
        self._state = execution.state
        self._is_awaited = execution.state.is_awaited
        self._link = link
        self._doorbell, self._channel = link.doorbell, link.channel
        self._is_alone = link.generation.size == 1
        self._last_look = 0.0
        self._is_asleep = self._is_asked = self._is_concluding = False
        # whether the engine's thread has ended, or will end without another look at the submissions
        self.is_over = False
        self._turn = threading.Lock()
        self._signals = DeferredSignals(self._wake)
        self._begun = allocate_lock()  # taken by the thread, or by the caller of ``stop`` if that has not begun
        self._thread = threading.Thread(target=self._run, name="horovod-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._signals.install()
        self._thread.start()

    # -- other threads; an exception may break in anywhere -------------------------------------------------------

    def submit(self, handle: Handle, patient: bool) -> None:
        """Hand in a submission.

        Raises:
            DuplicateNameError: a tensor of this name is in flight.
        """
        try:
            self._state.submit(handle)
        finally:
            if not patient:
                self._state.submitted_ns = handle.times[SUBMITTED]
            # A thread that does the engine's work may sleep, too; the engine's thread leaves the submission to it.
            if (self._is_asleep or self._state.waits) and not (self._signals.allows() if patient else self._is_alone):
                self._wake()
            if self.is_over:
                self._execution.sweep()

    def run(self, handle: Handle, limit_s: float = math.inf) -> None:
        """Hand in a submission and ``wait`` for it."""
        if not self._signals.allows():
            self.submit(handle, patient=True)
            self.wait(handle, limit_s)
            return
        has_worked = False
        try:
            self._signals.enter()
            self._state.submit(handle)
            has_worked = self._work_if_free(handle, limit_s)
        finally:
            self._signals.leave()
        if self.is_over:
            self._execution.sweep()
        if handle.done:
            return
        if has_worked and limit_s < math.inf:
            self._wake()  # the engine's thread goes on
        else:
            self.wait(handle, limit_s)

    def wait(self, handle: Handle, limit_s: float = math.inf) -> None:
        """Block until ``handle`` is done, or for ``limit_s`` seconds; do the work meanwhile, if that is possible.

        Raises:
            RequestError: this thread executes another operation, so that it would wait for itself.
        """
        try:
            while not handle.done and self._state.reason is None and self._signals.allows():
                try:
                    self._signals.enter()
                    if not self._work_if_free(handle, limit_s):
                        break
                finally:
                    self._signals.leave()
                # A signal handler has run and raised nothing.
                if limit_s < math.inf:
                    return
            if not handle.done:
                self._wait_behind(handle, limit_s)
        finally:
            if limit_s < math.inf and not handle.done:
                # The engine's thread goes on; it may have been idle.
                self._wake()

    def _work_if_free(self, handle: Handle, limit_s: float) -> bool:
        """Do the work if no other thread does; return whether this one did."""
        me, owners = get_ident(), self._state.owners
        if me in owners:
            return False
        try:
            owners.add(me)  # first of all: a finalizer may run as soon as the turn is taken
            if not self._turn.acquire(False):
                return False
            self._work(handle, limit_s)
        finally:
            owners.discard(me)
        return True

    def _wait_behind(self, handle: Handle, limit_s: float) -> None:
        """Let another thread do the work."""
        wait = ThreadWait(get_ident(), handle, now())
        waits, left_s = self._state.waits, limit_s
        try:
            waits[id(wait)] = wait
            signal = self._hand_over(handle)
            while not handle.done and left_s > 0:
                if wait.thread in self._state.owners:
                    raise RequestError(_WITHIN)
                slice_s = min(_LOOK_S, left_s)
                if not signal.acquire(True, slice_s):
                    left_s -= slice_s
                    if self.is_over:
                        self._execution.sweep()
                        handle.finish(self._state.error())  # an interrupt may have removed it from the tables
        finally:
            waits.pop(id(wait), None)

    def _hand_over(self, handle: Handle) -> Any:
        """Wake the engine's thread; return the lock that is released when ``handle`` is done."""
        signal = allocate_lock()
        signal.acquire()
        handle.waiters.append(signal)
        self._wake()
        return signal

    def pause(self, act: Callable[[], None]) -> None:
        """Call ``act`` while no thread executes an operation; a first Ctrl-C waits until ``act`` is over."""
        me, owners = get_ident(), self._state.owners
        if me in owners:
            raise RequestError(_WITHIN)
        try:
            self._signals.enter()
            owners.add(me)
            while not self._turn.acquire(True, _LOOK_S):
                if self.is_over:
                    return
            try:
                act()
            finally:
                self._turn.release()
        finally:
            owners.discard(me)
            self._signals.leave()

    def look(self) -> None:
        """Let the engine check now for finished operations, even if no thread waits for one."""
        self._is_asked = True
        if self._is_asleep:
            self._wake()
        # Give the interpreter to the engine's thread: a caller that polls in a loop would keep it.
        time.sleep(0)

    def abort(self, error: HorovodInternalError) -> None:
        """End every wait of every thread with ``error``, also one in the middle of an operation; does not block."""
        if self._link.watch is None:
            self.pause(lambda: self._execution.abandon(error))
        else:
            self._link.watch.abort(error)
            self._wake()

    def stop(self, reason: str, timeout_s: float) -> bool:
        """Leave the job; False if the thread did not end in time, because it waits for a peer. Ranks that wait for this
        one get ``reason`` as the error.
        """
        if self._state.reason is None:
            self._state.reason = reason
        self._signals.remove()
        if self._begun.acquire(False):
            self._end()
        if self._thread.ident is None:
            return True
        self._wake()
        self._thread.join(timeout_s)
        while self._is_concluding:
            # The end of the thread has time limits of its own.
            self._thread.join(_LOOK_S)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        try:
            self._doorbell.ring()
        except ValueError:
            pass  # the control page is gone when the engine has ended

    # -- the work ------------------------------------------------------------------------------------------------

    def _work(self, handle: Handle, limit_s: float) -> None:
        """Do the work until ``handle`` is done or ``limit_s`` is over; release the caller's turn at the end."""
        doorbell, execution, signals, state = self._doorbell, self._execution, self._signals, self._state
        last_look = started = 0.0
        heard = -1
        wait: ThreadWait | None = None
        is_working = False
        try:
            heard = doorbell.awake()
            while True:
                is_working = True
                execution.step(awaited=True)
                is_working = False
                if handle.done or signals.is_pending or state.reason is not None:
                    break
                if doorbell.look(execution.has_news):
                    heard = doorbell.heard()
                    continue
                if wait is None:
                    wait = ThreadWait(get_ident(), handle, now())
                    state.waits[id(wait)] = wait
                doorbell.ring_deferred()
                seen = doorbell.heard()
                doorbell.announce(execution.goal())
                if not (execution.has_news() or self._is_alarmed()):
                    doorbell.sleep(seen, min(self._slice_s(), limit_s), parked=False)
                heard = doorbell.awake()
                clock = time.monotonic()
                started = started or clock
                if clock - started >= limit_s:
                    break
                if clock - last_look >= _LOOK_S or self._is_alarmed():
                    last_look = clock
                    is_working = True
                    execution.tick(clock - started)
                    is_working = False
        except BaseException as error:
            if not is_working:
                raise  # set by another thread, or a second Ctrl-C: nothing is half done
            execution.abandon(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            if wait is not None:
                state.waits.pop(id(wait), None)
            doorbell.park()
            self._turn.release()
            try:
                # Another thread may have left its work to this one, and a peer that rang found this rank awake.
                is_due = state.reason is not None or (state.waits and self._is_awaited())
                if is_due or (doorbell.heard() != heard and execution.has_news()):
                    self._wake()
            except ValueError:
                pass  # another thread has called shutdown(), and the control page is gone

    def _run(self) -> None:
        if not self._begun.acquire(False):
            return  # start() was interrupted, and this rank has left the job
        doorbell, execution, state = self._doorbell, self._execution, self._state
        state.owners.add(me := get_ident())  # it never waits for an operation
        self._last_look = time.monotonic()
        while state.reason is None:
            if doorbell.share == 1:
                self._let_submit()
            heard = doorbell.heard()
            is_wanted = not self._is_alone or self._is_asked or self._is_awaited()
            self._is_asked = False
            slice_s = _LOOK_S if is_wanted else _IDLE_S
            if is_wanted and self._turn.acquire(False):
                try:
                    slice_s = self._take_turn(heard)
                except BaseException as error:
                    execution.abandon(error)
                finally:
                    self._turn.release()
            if slice_s:
                self._is_asleep = True
                # A thread that has come since the last step saw this one awake, and so did not ring.
                is_due = (is_wanted and execution.has_news()) or self._is_asked or self._is_awaited()
                try:
                    if not is_due and state.reason is None:
                        doorbell.sleep(heard, slice_s, parked=True)
                    elif self._turn.locked():
                        # A waiting thread does the work.
                        doorbell.sleep(heard, _LOOK_S, parked=True)
                except BaseException as error:  # from a closed descriptor, or set by another thread
                    execution.abandon(error)
                    time.sleep(_LOOK_S)
                self._is_asleep = False
                if not execution.has_news():
                    # The doorbell rang for something else.
                    execution.attend()
        self._turn.acquire()
        self._end()
        state.owners.discard(me)

    def _let_submit(self) -> None:
        """Wait, on a rank with one core, until its thread has submitted its sequence of operations.

        Otherwise the two threads alternate, which made fifty allreduces of 1 MiB a fifth slower.
        """
        for _ in range(_PAUSES):
            left_s = _QUIET_S - self._state.quiet_s(now())
            if left_s <= 0 or self._is_awaited() or self._state.reason is not None:
                return
            time.sleep(left_s)

    def _take_turn(self, heard: int) -> float:
        """Do the pending work; return the seconds that the thread may sleep, or 0 if it has slept."""
        doorbell, execution = self._doorbell, self._execution
        doorbell.awake()
        execution.step(self._is_awaited())
        if self._is_awaited() and doorbell.look(execution.has_news):
            return 0
        clock = time.monotonic()
        has_looked = clock - self._last_look >= _LOOK_S or self._is_alarmed()
        if has_looked:
            self._last_look = clock
            execution.tick(self._state.waited_s(now(), _LOOK_S))
        slice_s = self._slice_s()
        if self._is_awaited():
            doorbell.ring_deferred()
            doorbell.announce(execution.goal())
            self._is_asleep = True
            if not execution.has_news() and self._state.reason is None:
                doorbell.sleep(heard, slice_s, parked=False)
            self._is_asleep = False
            return 0
        doorbell.park()
        # Sleep for long only after a check of the other ranks: the doorbell may have rung for them.
        return _IDLE_S if has_looked and slice_s == _LOOK_S and execution.is_quiet() else slice_s

    def _slice_s(self) -> float:
        return _BEHIND_S if self._channel.is_behind() else _LOOK_S

    def _is_alarmed(self) -> bool:
        watch = self._link.watch
        return watch is not None and watch.is_alarmed

    def _end(self) -> None:
        execution = self._execution
        try:
            self._is_concluding = True
            execution.conclude()
            self._is_concluding = False
            execution.leave(self._state.reason or "")
        except BaseException as error:
            self._is_concluding = False
            execution.abandon(error)
        self.is_over = True
        execution.sweep()
        execution.close()
