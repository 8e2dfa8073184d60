"""Who makes progress, and when it sleeps.

One lock: its holder runs the log. A thread that waits for a result takes the lock and does the work itself
(handing a small operation to another thread and back costs more than the operation). A background thread does
it while the caller is away, so that communication overlaps with computing; it sleeps in the kernel unless
somebody rings, and never spins. On the caller's only core it does not interrupt a caller who submits one operation
after the other (to take turns made fifty allreduces of 1 MiB a fifth slower). A second waiting thread sleeps until
its handle is done or the lock is free.
"""

from __future__ import annotations

import collections
import threading
import time

from horovod.engine.handles import Handle
from horovod.engine.ports import Channel, Doorbell
from horovod.engine.stepper import Stepper

__all__ = ["Progress"]

_SLICE_S = 0.1
_BEHIND_SLICE_S = 0.001
#: A rank with nothing in flight is rung for whatever concerns it; and to run at all, after a pause, may take 20 ms.
_IDLE_SLICE_S = 30.0
#: A caller that has submitted nothing for so long does something else now; and how often to wait for that.
_QUIET_S, _PAUSES = 0.0005, 40


class Progress:
    """See the module.

    Args:
        stepper: what to do.
        channel: tells whether there is something to do.
        doorbell: None for one rank alone, which needs no background thread.
    """

    def __init__(self, stepper: Stepper, channel: Channel, doorbell: Doorbell | None) -> None:
        self._stepper = stepper
        self._channel = channel
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._waiters: collections.deque[threading.Lock] = collections.deque()
        self._stopping = False
        #: Whether the background thread may be about to sleep for long: who submits something must wake it.
        self.dozes = False
        self._thread: threading.Thread | None = None
        if doorbell is not None:
            self._thread = threading.Thread(target=self._background, name="horovod-engine", daemon=True)

    def start(self) -> int:
        """Start the background thread and return its identifier; 0 if there is none."""
        if self._thread is None:
            return 0
        self._thread.start()
        return self._thread.ident or 0

    def stop(self, timeout_s: float) -> bool:
        """End the background thread; False if it did not end in time, because it waits for a peer."""
        self._stopping = True
        if self._thread is None or self._doorbell is None or self._thread.ident is None:
            return True
        self._doorbell.ring()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def kick(self) -> None:
        """See to it that what was submitted is worked on though nobody waits for it.

        One rank alone has nobody to do it meanwhile: it is done when somebody looks.
        """
        if self._doorbell is not None:
            self._doorbell.ring()

    def look(self) -> None:
        """Make the progress that nobody else may be making: of one rank alone, or after others did their part."""
        if (self._doorbell is None or self._stepper.has_news()) and self._lock.acquire(False):
            try:
                self._stepper.step()
            finally:
                self.release()

    def exclusively(self, timeout_s: float) -> bool:
        """Take the lock; False if it is not to be had in time. ``release`` gives it back."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        """Give up the lock and wake a waiting thread, if there is one."""
        self._lock.release()
        if self._waiters:
            for signal in list(self._waiters):
                if signal.locked():
                    signal.release()
                    return

    # -- threads that wait ---------------------------------------------------------------------------------------

    def wait(self, handle: Handle) -> None:
        """Block until ``handle`` is done; make progress meanwhile."""
        if self._lock.acquire(False):
            self._pump_and_release(handle)
        else:
            self._wait_behind(handle)

    def linger(self, handle: Handle) -> None:
        """Make progress as ``wait`` does, but only until it would sleep; the background thread does the rest."""
        if self._doorbell is None or self._lock.acquire(False):
            self._pump_and_release(handle, sleeps=False)
        else:
            self._doorbell.insist()
            self.kick()

    def _wait_behind(self, handle: Handle) -> None:
        if self._doorbell is not None:
            self._doorbell.insist()
        signal = threading.Lock()
        signal.acquire()
        handle.waiter = signal
        self._waiters.append(signal)
        try:
            while not handle.done:
                if self._lock.acquire(False):
                    self._pump_and_release(handle)
                    return
                signal.acquire(timeout=_SLICE_S)
        finally:
            self._waiters.remove(signal)

    def _pump_and_release(self, handle: Handle, sleeps: bool = True) -> None:
        doorbell = self._doorbell
        if doorbell is None:
            try:
                self._stepper.step()
            finally:
                self.release()
            return
        channel = self._channel
        heard = -1
        try:
            doorbell.awake()
            channel.patient = True
            heard = self._pump(handle, doorbell, sleeps)
        except BaseException as error:
            self._stepper.abandon(error)
            raise
        finally:
            channel.patient = False
            doorbell.park()
            doorbell.insist()
            self.release()
            if doorbell.heard() != heard and self._stepper.has_news():
                # Who rang in between found this rank awake; the parked thread has to be told.
                doorbell.ring()

    def _pump(self, handle: Handle, doorbell: Doorbell, sleeps: bool) -> int:
        """Make progress until ``handle`` is done, or there is none to be made and the caller does not want to sleep.

        Returns:
            What the doorbell had heard before the last look.
        """
        stepper, channel = self._stepper, self._channel
        step, has_news = stepper.step, stepper.has_news
        started = last_look = 0.0
        while True:
            heard = doorbell.heard()
            step()
            if handle.done:
                return heard
            for _ in doorbell.looks():
                if has_news():
                    doorbell.succeeded()
                    break
            else:
                if not sleeps:
                    return heard
                doorbell.insist()
                seen = doorbell.heard()
                doorbell.announce(stepper.goal())
                if not has_news():
                    doorbell.sleep(seen, _BEHIND_SLICE_S if channel.is_behind() else _SLICE_S, parked=False)
                doorbell.awake()
                now = time.monotonic()
                started = started or now
                if now - last_look >= _SLICE_S:
                    last_look = now
                    stepper.tick(now - started)

    # -- the background thread -----------------------------------------------------------------------------------

    def _let_the_caller_submit(self, doorbell: Doorbell) -> None:
        """Pause while the caller, who has no other core, submits one operation after the other."""
        for _ in range(_PAUSES):
            left = _QUIET_S - self._stepper.quiet_s()
            if left <= 0 or self._stopping:
                return
            if self._lock.acquire(False):
                # This thread looks again by itself; nobody need wake it.
                doorbell.awake()
                self.release()
            time.sleep(left)

    def _background(self) -> None:
        doorbell = self._doorbell
        assert doorbell is not None
        stepper, channel = self._stepper, self._channel
        last_look = time.monotonic()
        while not self._stopping:
            if doorbell.share == 1:
                self._let_the_caller_submit(doorbell)
            seen = doorbell.heard()
            slice_s = _SLICE_S
            if self._lock.acquire(False):
                try:
                    doorbell.awake()
                    if not self._waiters:
                        stepper.step()
                    now = time.monotonic()
                    has_looked = now - last_look >= _SLICE_S
                    if has_looked:
                        last_look = now
                        stepper.tick(_SLICE_S)
                    doorbell.park()
                    seen = doorbell.heard()
                    if stepper.has_news() and not self._waiters:
                        continue
                    if channel.is_behind():
                        slice_s = _BEHIND_SLICE_S
                    elif has_looked:
                        # Only who has just looked may sleep for long: it may have been rung for what that shows.
                        self.dozes = True
                        if stepper.is_idle():
                            slice_s = _IDLE_SLICE_S
                except BaseException as error:
                    stepper.abandon(error)
                finally:
                    doorbell.park()
                    self.release()
            stepper.attend()
            doorbell.sleep(seen, slice_s, parked=True)
            self.dozes = False
