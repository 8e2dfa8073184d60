"""Threads that run one at a time and change only where a schedule says: every interleaving of a few of them, tried.

A *schedule* is the list of those moments, by number, at which something else happens than usual. A moment is a line of
the code under test, or a thread that blocks or ends. Usually the same thread goes on until it blocks; a schedule lets
another one go on. Locks, futexes, threads and clocks of the engine are replaced by those of a ``Stage``: time passes
only when everybody sleeps, so a wake-up that gets lost shows as time that has passed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any

__all__ = ["Actor", "Lock", "Stage", "Stuck", "schedules"]

#: How many moments one run may have before it counts as one that never ends.
_MOST = 60_000
_LIMIT_S = 120.0


class Stuck(AssertionError):
    """Nobody can go on, or they do so for ever."""


class _Abandoned(BaseException):
    """Ends an actor whose run is over."""


class Actor:
    """One thread."""

    def __init__(self, stage: Stage, name: str, act: Callable[[], Any]) -> None:
        self.name = name
        self.is_done = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.condition: Callable[[], bool] | None = None
        self.until: float | None = None
        self.lines = 0
        self.gate: SimpleQueue[None] = SimpleQueue()  # a semaphore without lines of Python
        self._stage = stage
        self._act = act
        self.thread = threading.Thread(target=self._play, name=name, daemon=True)

    @property
    def can_go_on(self) -> bool:
        """Whether it would do something if it were let."""
        return not self.is_done and (self.condition is None or self.condition())

    def _play(self) -> None:
        stage = self._stage
        self.gate.get()
        sys.settrace(stage.trace)
        try:
            self.result = self._act()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self.is_done = True
            stage.leave()


class Lock:
    """A lock of ``_thread.allocate_lock``, on a stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._is_locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As that of a lock."""
        if self._is_locked and blocking:
            self._stage.block(lambda: not self._is_locked, timeout if timeout >= 0 else None)
        if self._is_locked:
            return False
        self._is_locked = True
        return True

    def release(self) -> None:
        """As that of a lock."""
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False

    def locked(self) -> bool:
        """As that of a lock."""
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """A thread of ``threading.Thread``, on a stage."""

    def __init__(self, stage: Stage, target: Callable[[], Any], name: str, daemon: bool = True) -> None:
        self._stage = stage
        self._actor = Actor(stage, name, target)
        self.ident: int | None = None

    def start(self) -> None:
        """As that of a thread."""
        self.ident = id(self)
        self._stage.enter(self._actor)

    def is_alive(self) -> bool:
        """As that of a thread."""
        return self.ident is not None and not self._actor.is_done

    def join(self, timeout: float | None = None) -> None:
        """As that of a thread."""
        self._stage.block(lambda: self._actor.is_done, timeout)


class Stage:
    """Where actors play, one at a time.

    Args:
        schedule: moment to which of the others goes on, counted from 1.
        files: names of the files whose lines are moments.
        interrupt: an actor's name, and the line among those it comes to at which an exception comes out of nowhere.

    Attributes:
        choices: how many could have gone on, at each moment so far.
        is_recording: whether moments are counted, and may differ from the usual.
        has_interrupted: whether the exception out of nowhere has come.
        clock: seconds that have passed because nobody could go on.
        words: addresses of words on which somebody may sleep, and which word it is; views of one page differ.
    """

    def __init__(
        self,
        schedule: dict[int, int],
        files: frozenset[str],
        interrupt: tuple[str, int, type[BaseException]] | None = None,
    ) -> None:
        self.choices: list[int] = []
        self.clock = 0.0
        self.words: dict[int, Any] = {}
        self.is_recording = True
        self.has_interrupted = False
        self._schedule = schedule
        self._files = files
        self._interrupt = interrupt
        self._actors: list[Actor] = []
        self._current: Actor | None = None
        self._sleepers: list[list[Any]] = []
        self._over = threading.Semaphore(0)
        self._stuck: str = ""
        self._moments = 0
        self._awaited: list[Actor] = []

    # -- what replaces the operating system ------------------------------------------------------------------------

    def lock(self) -> Lock:
        """Return a lock."""
        return Lock(self)

    def thread(self, target: Callable[[], Any], name: str, daemon: bool = True) -> Thread:
        """Return a thread that is not started."""
        return Thread(self, target, name, daemon)

    def sleep(self, seconds: float) -> None:
        """Let time pass, if nobody else can go on."""
        if seconds > 0:
            self.block(lambda: False, seconds)
        else:
            self._moment(is_offer=True)

    def futex_wait(self, address: int, expected: int, timeout_s: float, channel: int) -> bool:
        """As ``futex.wait``."""
        if ctypes.c_uint32.from_address(address).value != expected & 0xFFFFFFFF:
            return True
        sleeper = [self.words[address], channel, False]
        self._sleepers.append(sleeper)
        self.block(lambda: sleeper[2], timeout_s)
        self._sleepers.remove(sleeper)
        return bool(sleeper[2])

    def futex_wake(self, address: int, channel: int) -> None:
        """As ``futex.wake``."""
        for sleeper in self._sleepers:
            if sleeper[0] == self.words[address] and sleeper[1] & channel:
                sleeper[2] = True

    # -- actors ----------------------------------------------------------------------------------------------------

    def enter(self, actor: Actor) -> None:
        """Let an actor take part from now on."""
        self._actors.append(actor)
        actor.thread.start()

    def play(self, *acts: Callable[[], Any], names: str = "") -> list[Actor]:
        """Run functions at the same time until all have ended; what else was started may go on afterwards.

        Raises:
            Stuck: they do not end.
        """
        called = names.split() or [f"actor {index}" for index in range(len(acts))]
        actors = [Actor(self, name, act) for name, act in zip(called, acts, strict=True)]
        for actor in actors:
            self.enter(actor)
        self._awaited = actors
        self._pass_on()
        if not self._over.acquire(timeout=_LIMIT_S):
            self._stuck = self._stuck or "a thread blocks in something that the stage does not know"
        if self._stuck:
            raise Stuck(self._stuck)
        return actors

    def close(self) -> None:
        """End all that still goes on."""
        self._stuck = self._stuck or "over"
        for actor in self._actors:
            while not actor.is_done:
                actor.gate.put(None)
                actor.thread.join(0.001)
            actor.thread.join(_LIMIT_S)

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace function of all actors."""
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self._moment()
        return self.trace

    def go_on(self) -> None:
        """Count moments again on this thread; an exception out of nowhere has put an end to that."""
        sys.settrace(self.trace)

    def block(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Let others go on until a condition holds, or the time is over and nobody else can go on."""
        if self._stuck:
            raise _Abandoned
        me = self._me()
        if not condition():
            me.condition = condition
            me.until = None if timeout_s is None else self.clock + timeout_s
            self._pass_on()
            self._wait_for_turn(me)
            me.condition = me.until = None

    def leave(self) -> None:
        """The current actor has ended."""
        if not self._stuck:
            self._pass_on()

    def _me(self) -> Actor:
        assert self._current is not None
        return self._current

    def _wait_for_turn(self, me: Actor) -> None:
        me.gate.get()
        if self._stuck:
            raise _Abandoned

    def _moment(self, is_offer: bool = False) -> None:
        if self._stuck:
            raise _Abandoned
        me = self._me()
        me.lines += 1
        if self._interrupt is not None and self._interrupt[:2] == (me.name, me.lines):
            self.has_interrupted = True
            raise self._interrupt[2](me.name)
        others = [actor for actor in self._following(me) if actor.can_go_on]
        chosen = self._choose(1 + len(others))
        if is_offer and others and not chosen:
            chosen = 1
        if chosen:
            self._hand_to(others[chosen - 1])
            self._wait_for_turn(me)

    def _choose(self, count: int) -> int:
        self._moments += 1
        if self._moments > _MOST:
            self._end("they go on for ever")
            raise _Abandoned
        if not self.is_recording:
            return 0
        chosen = min(self._schedule.get(len(self.choices), 0), count - 1)
        self.choices.append(count)
        return chosen

    def _following(self, actor: Actor) -> list[Actor]:
        index = self._actors.index(actor)
        return self._actors[index + 1 :] + self._actors[:index]

    def _hand_to(self, actor: Actor) -> None:
        self._current = actor
        actor.gate.put(None)

    def _end(self, why: str = "") -> None:
        if why and not self._stuck:
            states = [
                f"{a.name} {'is done' if a.is_done else 'waits' if a.condition else 'runs'}" for a in self._actors
            ]
            self._stuck = f"{why}: {', '.join(states)}"
        self._over.release()

    def _pass_on(self) -> None:
        """Choose who goes on after an actor that cannot."""
        if all(actor.is_done for actor in self._awaited):
            self._end()
            return
        while True:
            ready = [a for a in (self._following(self._current) if self._current else []) if a.can_go_on]
            ready = ready or [actor for actor in self._actors if actor.can_go_on]
            if ready:
                self._hand_to(ready[self._choose(len(ready))])
                return
            sleeping = [actor.until for actor in self._actors if not actor.is_done and actor.until is not None]
            if not sleeping or self.clock > _LIMIT_S:
                self._end("nobody can go on")
                return
            self.clock = min(sleeping)
            for actor in self._actors:
                if not actor.is_done and actor.until is not None and actor.until <= self.clock:
                    actor.condition, actor.until = None, None


def schedules(run: Callable[[dict[int, int]], list[int]], most: int, start: int = 0) -> Iterator[dict[int, int]]:
    """Run every schedule that differs from the usual in ``most`` moments at most; yield each after its run.

    Args:
        run: runs a schedule and returns the choices that there were.
        most: how many moments.
        start: the first moment that may differ.
    """
    pending: list[dict[int, int]] = [{}]
    while pending:
        schedule = pending.pop()
        choices = run(schedule)
        yield schedule
        if len(schedule) < most:
            first = max(schedule, default=start - 1) + 1
            pending += [
                {**schedule, moment: other}
                for moment in range(first, len(choices))
                for other in range(1, choices[moment])
            ]
