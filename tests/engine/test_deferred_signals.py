"""How handlers of signals wait for the work in hand: those of the script, too, as if nobody had touched them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from horovod.engine import signals
from horovod.engine.signals import DeferredSignals, obey_sigterm

_RARE = (signal.SIGWINCH, signal.SIGIO, signal.SIGRTMIN)


class Alarm(Exception):
    pass


@pytest.fixture
def deferred() -> Iterator[DeferredSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's, which ends a test that takes too long
    yield DeferredSignals(lambda: None)
    for number, handler in before.items():
        signal.signal(number, handler)


def _handled(came: list[int]) -> Callable[[int, FrameType | None], None]:
    """Have the script's handler of SIGUSR1 and SIGUSR2 note what came; return it."""

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handler)
    return handler


def test_another_handler_stands_in_for_the_scripts_only_during_the_work(deferred: DeferredSignals) -> None:
    came: list[int] = []
    handler = _handled(came)
    assert deferred.allows()
    deferred.enter()
    assert signal.getsignal(signal.SIGUSR1) is not handler
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
        signal.raise_signal(number)
    assert (came, deferred.is_pending) == ([], True)
    deferred.leave()
    assert (came, deferred.is_pending) == ([signal.SIGUSR2, signal.SIGUSR1], False)
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is handler
    signal.raise_signal(signal.SIGUSR1)
    assert len(came) == 3


def test_the_engine_is_woken_before_a_handler_that_has_waited_may_raise(deferred: DeferredSignals) -> None:
    """Else nobody would see a submission that the handler keeps its caller from waiting for."""
    events: list[object] = []
    deferred._wake = lambda: events.append("wake")
    signal.signal(signal.SIGUSR1, lambda number, frame: events.append(number))
    assert deferred.allows()
    deferred.enter()
    signal.raise_signal(signal.SIGUSR1)
    deferred.leave()
    assert events == ["wake", signal.SIGUSR1]


def test_a_second_sigterm_does_not_wait(deferred: DeferredSignals) -> None:
    came: list[int] = []
    usual = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        assert deferred.allows()
        deferred.enter()
        signal.raise_signal(signal.SIGTERM)
        assert came == []
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
        deferred.leave()
        assert came == [signal.SIGTERM]
        assert not deferred.is_pending
    finally:
        signal.signal(signal.SIGTERM, usual)


def test_an_exception_of_one_handler_keeps_no_other_from_its_turn(deferred: DeferredSignals) -> None:
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise Alarm

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handler)
    assert deferred.allows()
    deferred.enter()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    for _ in range(2):
        with pytest.raises(Alarm):
            deferred.leave()
    assert came == [signal.SIGUSR1, signal.SIGUSR2]
    assert not deferred.is_pending


def test_what_broke_into_entering_leaves_handlers_that_work(
    deferred: DeferredSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)

    usual, left = signals._set_handler, [1]

    def breaks(number: int, new: Any) -> Any:
        if not left:
            raise Alarm
        left.pop()
        return usual(number, new)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handler)
    assert deferred.allows()
    monkeypatch.setattr(signals, "_set_handler", breaks)
    with pytest.raises(Alarm):
        deferred.enter()
    monkeypatch.undo()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    assert came == [signal.SIGUSR1, signal.SIGUSR2]
    deferred.leave()
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is handler


def test_the_handler_of_a_rare_signal_is_found_within_a_moment(
    deferred: DeferredSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, came = [10**9], list[int]()
    monkeypatch.setattr(signals, "now", lambda: clock[0])
    assert deferred.allows()
    usual = [signal.signal(number, lambda number, frame: came.append(number)) for number in _RARE]
    try:
        clock[0] += 10**6
        assert deferred.allows()
        deferred.enter()
        for number in _RARE:
            signal.raise_signal(number)
        assert came == []
        deferred.leave()
        assert came == list(_RARE)
    finally:
        for number, handler in zip(_RARE, usual, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF])
def test_the_handler_of_any_timer_is_found_at_once(deferred: DeferredSignals, number: int) -> None:
    assert deferred.allows()
    usual = signal.signal(number, lambda *_: None)
    try:
        assert not deferred.allows()
    finally:
        signal.signal(number, usual)
    assert deferred.allows()


def test_a_signal_that_comes_while_another_ones_handler_stands_in_is_kept_as_well(deferred: DeferredSignals) -> None:
    came: list[int] = []

    class Interrupted(int):
        """A number that is compared at the moment at which the next signal comes."""

        def __eq__(self, other: object) -> bool:
            if not came:
                came.append(0)
                signal.raise_signal(signal.SIGUSR2)
            return int(self) == other

        __hash__ = int.__hash__

    handler = _handled(came)
    assert deferred.allows()
    deferred.enter()
    deferred._handlers[signal.SIGHUP] = handler
    deferred._waiting.append((Interrupted(signal.SIGHUP), None))
    signal.raise_signal(signal.SIGUSR1)
    deferred.leave()
    assert came == [0, signal.SIGHUP, signal.SIGUSR2, signal.SIGUSR1]


def test_a_handler_that_an_earlier_signals_handler_has_replaced_does_not_run(deferred: DeferredSignals) -> None:
    came: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGUSR2, lambda *_: came.append("new")))
    signal.signal(signal.SIGUSR2, lambda *_: came.append("old"))
    assert deferred.allows()
    deferred.enter()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    deferred.leave()
    assert came == ["new"]


def test_the_handler_of_a_first_process_leaves_the_decision_to_one_that_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's calls the one before it, if there is one."""
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            obey_sigterm()
        own = signal.getsignal(signal.SIGTERM)
        assert callable(own)
        signal.signal(signal.SIGTERM, lambda number, frame: own(number, frame))
        signal.raise_signal(signal.SIGTERM)
        assert ends == []
        signal.signal(signal.SIGTERM, own)
        signal.raise_signal(signal.SIGTERM)
        assert ends == [128 + signal.SIGTERM]
        read_end, write_end = os.pipe()
        if not (pid := os.fork()):
            os.write(write_end, str(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert os.read(read_end, 16) == b"True"
        os.close(read_end)
        os.close(write_end)
    finally:
        signal.signal(signal.SIGTERM, before)
