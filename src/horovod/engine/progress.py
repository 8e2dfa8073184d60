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
from typing import Protocol

from horovod.engine.channel import Channel
from horovod.engine.handles import Handle
from horovod.transports.shm import futex
from horovod.transports.shm.control import HOLDER, PARKED, Control
from horovod.transports.shm.spinner import Spinner

__all__ = ["Progress", "Stepper"]

_SLICE_S = 0.1
_BEHIND_SLICE_S = 0.001
#: A rank with nothing in flight is rung for whatever concerns it; and to run at all, after a pause, may take 20 ms.
_IDLE_SLICE_S = 30.0
#: A caller that has submitted nothing for so long does something else now; and how often to wait for that.
_QUIET_S, _PAUSES = 0.0005, 40


class Stepper(Protocol):
    """What progress consists of; all of it is called with the lock held."""

    def step(self) -> None:
        """Execute what the log holds; after a failure, fail what is in flight."""

    def tick(self, waited_s: float) -> None:
        """Look after the other ranks; raises when there is no point in waiting."""

    def has_news(self) -> bool:
        """Whether ``step`` has something to do."""

    def goal(self) -> int:
        """Return the flag that all must have come to before ``step`` has something to do again, or ``NO_GOAL``."""

    def attend(self) -> None:
        """Answer other ranks' questions; called without the lock."""

    def abandon(self, error: BaseException) -> None:
        """Fail for good, because of ``error``."""

    def is_idle(self) -> bool:
        """Whether nothing is in flight."""

    def quiet_s(self) -> float:
        """Return how long ago the caller has submitted what it does not wait for."""


class Progress:
    """See the module.

    Args:
        stepper: what to do.
        channel: tells whether there is something to do.
        control: the control page; None for one rank alone, which needs no background thread.
    """

    def __init__(self, stepper: Stepper, channel: Channel, control: Control | None) -> None:
        self._stepper = stepper
        self._channel = channel
        self._control = control
        self._lock = threading.Lock()
        self._waiters: collections.deque[threading.Lock] = collections.deque()
        self._stopping = False
        self._thread: threading.Thread | None = None
        if control is not None:
            self._spinner = Spinner(control.crowded)
            self._mode = control.mode[control.rank]
            self._bell = control.bell[control.rank]
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
        if self._thread is None or self._control is None or self._thread.ident is None:
            return True
        self._control.ring(self._control.rank)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def kick(self) -> None:
        """See to it that what was submitted is worked on though nobody waits for it.

        One rank alone has nobody to do it meanwhile: it is done when somebody looks.
        """
        if self._control is not None:
            self._control.ring(self._control.rank)

    def look(self) -> None:
        """Make the progress that nobody else may be making: of one rank alone, or after others did their part."""
        if (self._control is None or self._stepper.has_news()) and self._lock.acquire(False):
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

    def _wait_behind(self, handle: Handle) -> None:
        if self._control is not None:
            self._control.insist()
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

    def _pump_and_release(self, handle: Handle) -> None:
        control = self._control
        if control is None:
            try:
                self._stepper.step()
            finally:
                self.release()
            return
        words, bell, channel = control.words32, self._bell, self._channel
        heard = -1
        try:
            words[self._mode] = 0
            channel.patient = True
            heard = self._pump(handle, control)
        except BaseException as error:
            self._stepper.abandon(error)
            raise
        finally:
            channel.patient = False
            words[self._mode] = PARKED
            futex.fence()
            control.insist()
            self.release()
            if words[bell] != heard and self._stepper.has_news():
                # Who rang in between found this rank awake; the parked thread has to be told.
                control.ring(control.rank)

    def _pump(self, handle: Handle, control: Control) -> int:
        """Make progress until ``handle`` is done; return the bell's value before the last look."""
        stepper, channel, words = self._stepper, self._channel, control.words32
        step, has_news, mode, bell = stepper.step, stepper.has_news, self._mode, self._bell
        spinner = self._spinner
        started = last_look = 0.0
        while True:
            heard: int = words[bell]
            step()
            if handle.done:
                return heard
            for _ in spinner.looks():
                if has_news():
                    spinner.succeeded()
                    break
            else:
                control.insist()
                seen = words[bell]
                control.announce(stepper.goal())
                if not has_news():
                    control.sleep(seen, _BEHIND_SLICE_S if channel.is_behind() else _SLICE_S, HOLDER)
                words[mode] = 0
                now = time.monotonic()
                started = started or now
                if now - last_look >= _SLICE_S:
                    last_look = now
                    stepper.tick(now - started)

    # -- the background thread -----------------------------------------------------------------------------------

    def _let_the_caller_submit(self, control: Control) -> None:
        """Pause while the caller, who has no other core, submits one operation after the other."""
        for _ in range(_PAUSES):
            left = _QUIET_S - self._stepper.quiet_s()
            if left <= 0 or self._stopping:
                return
            if self._lock.acquire(False):
                # This thread looks again by itself; nobody need wake it.
                control.words32[self._mode] = 0
                self.release()
            time.sleep(left)

    def _background(self) -> None:
        control = self._control
        assert control is not None
        words, mode, bell, stepper, channel = control.words32, self._mode, self._bell, self._stepper, self._channel
        last_look = time.monotonic()
        while not self._stopping:
            if control.share == 1:
                self._let_the_caller_submit(control)
            seen = words[bell]
            slice_s = _SLICE_S
            if self._lock.acquire(False):
                try:
                    words[mode] = 0
                    if not self._waiters:
                        stepper.step()
                    now = time.monotonic()
                    if now - last_look >= _SLICE_S:
                        last_look = now
                        stepper.tick(_SLICE_S)
                        # Only who has just looked may sleep for long: it may have been rung for what that shows.
                        if stepper.is_idle():
                            slice_s = _IDLE_SLICE_S
                    words[mode] = PARKED
                    futex.fence()
                    seen = words[bell]
                    if stepper.has_news() and not self._waiters:
                        continue
                    if channel.is_behind():
                        slice_s = _BEHIND_SLICE_S
                except BaseException as error:
                    stepper.abandon(error)
                finally:
                    words[mode] = PARKED
                    self.release()
            stepper.attend()
            control.sleep(seen, slice_s, PARKED)
