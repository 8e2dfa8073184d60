"""Looks that take long are seldom."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from horovod.observe import pace
from horovod.observe.pace import Pace


@pytest.mark.parametrize(("used_s", "pause_s"), [(0.0, 0.0), (1 / 1024, 1 / 64), (1 / 16, 1.0), (0.5, 2.0)])
def test_who_has_looked_for_long_does_not_look_again_soon(
    used_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time_s=100.0, used_s=0.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock.time_s, thread_time=lambda: clock.used_s))
    looks = Pace()
    assert looks.is_due()
    with looks:
        clock.used_s += used_s
        clock.time_s += 30.0  # the machine was busy with something else
    clock.time_s += pause_s / 2
    assert looks.is_due() == (not pause_s)
    clock.time_s += pause_s / 2
    assert looks.is_due()
