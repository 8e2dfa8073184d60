"""When the engine's thread keeps out of the caller's way."""

from __future__ import annotations

import sys
import threading
import time
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from horovod.engine import progress
from horovod.engine.progress import Progress
from horovod.engine.records import ENDED
from horovod.links.local import LocalDoorbell


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def _engine(*quiet: float) -> Progress:
    """Whose caller has submitted something so long ago, in seconds, at each look."""
    nothing: Any = SimpleNamespace()
    made = Progress(nothing, nothing, LocalDoorbell())
    looks = iter(quiet)
    made._quiet_s = lambda: next(looks)  # type: ignore[method-assign]
    return made


def test_a_caller_that_has_stopped_submitting_is_not_waited_for(pauses: list[float]) -> None:
    _engine(1.0)._let_the_caller_submit()
    assert not pauses


def test_the_pause_ends_when_the_caller_could_have_been_quiet_for_long_enough(pauses: list[float]) -> None:
    wanted = progress._QUIET_S
    _engine(wanted / 4, wanted / 2, wanted)._let_the_caller_submit()
    assert pauses == pytest.approx([wanted * 3 / 4, wanted / 2])


def test_who_waits_for_a_result_is_not_kept_waiting(pauses: list[float]) -> None:
    engine = _engine(0.0)
    record: list[Any] = [None] * 8
    record[ENDED] = 0
    engine._awaited.add(record)
    engine._let_the_caller_submit()
    assert not pauses
    record[ENDED] = 1
    engine._quiet_s = lambda: 1.0  # type: ignore[method-assign]
    engine._let_the_caller_submit()
    assert not pauses


def test_a_caller_that_never_stops_is_not_waited_for_for_ever(pauses: list[float]) -> None:
    _engine(*[0.0] * 1000)._let_the_caller_submit()
    assert 0.001 < sum(pauses) < 0.1


def test_a_job_that_ends_is_not_held_up(pauses: list[float]) -> None:
    engine = _engine(0.0)
    engine._reason = "the end"
    engine._let_the_caller_submit()
    assert not pauses


def test_a_ring_wakes_all_threads_that_sleep() -> None:
    """Links of others use this bell, too: the engine's thread and one that waits sleep at it side by side."""
    for _ in range(20):
        bell = LocalDoorbell()
        threads = [threading.Thread(target=bell.sleep, args=(0, 600, False), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not all(_is_in(thread, bell.sleep.__code__) for thread in threads):
            time.sleep(0)
        bell.ring()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def _is_in(thread: threading.Thread, code: CodeType) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is code
