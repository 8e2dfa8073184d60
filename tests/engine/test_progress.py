"""When the engine's thread lets its caller go on submitting."""

from __future__ import annotations

import sys
import threading
import time
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from horovod.engine import loop
from horovod.engine.loop import Loop
from horovod.links.local import LocalDoorbell


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times: list[float] = []
    monkeypatch.setattr(loop, "time", SimpleNamespace(sleep=times.append))
    return times


def _let_submit(*quiet: float, is_awaited: bool = False) -> None:
    """Play the engine's thread beside a caller that has submitted something so long ago, in seconds, at each look."""
    looks = iter(quiet)
    state = SimpleNamespace(quiet_s=lambda now_ns: next(looks), reason=None)
    engine: Any = SimpleNamespace(_state=state, _is_awaited=lambda: is_awaited)
    Loop._let_submit(engine)


def test_a_caller_that_has_stopped_submitting_is_not_waited_for(slept: list[float]) -> None:
    _let_submit(1.0)
    assert not slept


def test_the_pause_ends_when_the_caller_could_have_been_quiet_for_long_enough(slept: list[float]) -> None:
    wanted = loop._QUIET_S
    _let_submit(wanted / 4, wanted / 2, wanted)
    assert slept == pytest.approx([wanted * 3 / 4, wanted / 2])


def test_who_waits_for_a_result_is_not_kept_waiting(slept: list[float]) -> None:
    _let_submit(0.0, is_awaited=True)
    assert not slept


def test_a_caller_that_never_stops_is_not_waited_for_for_ever(slept: list[float]) -> None:
    _let_submit(*[0.0] * 1000)
    assert 0.001 < sum(slept) < 0.1


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
