"""Looks that take long are seldom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from horovod.config import Config
from horovod.observe import observer


@pytest.mark.parametrize(("used_s", "pause_s"), [(0.0, 0.0), (1 / 1024, 1 / 64), (1 / 16, 1.0), (0.5, 2.0)])
def test_who_has_looked_for_long_does_not_look_again_soon(
    used_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time_s=100.0, used_s=0.0, looks=0)
    monkeypatch.setattr(
        observer, "time", SimpleNamespace(monotonic=lambda: clock.time_s, thread_time=lambda: clock.used_s)
    )

    def look(*_: object) -> None:
        clock.looks += 1
        clock.used_s += used_s
        clock.time_s += 30.0  # the machine was busy with something else

    watch: Any = observer.JobObserver(Config(), "job")
    watch._subject = SimpleNamespace(link=SimpleNamespace(coordinator=object()), position=0)
    watch._stalls = SimpleNamespace(is_busy=False, inspect=look)
    watch.tick()
    assert clock.looks == 1
    clock.time_s += pause_s / 2
    watch.tick()
    assert clock.looks == (1 if pause_s else 2)
    clock.time_s += pause_s / 2
    watch.tick()
    assert clock.looks == (2 if pause_s else 3)
