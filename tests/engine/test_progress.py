"""When the background thread keeps out of the caller's way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from horovod.engine import progress
from horovod.engine.progress import Progress
from horovod.links.shm.doorbell import ShmDoorbell
from horovod.transports.shm.control import PARKED, Control
from horovod.transports.shm.mapping import create_memfd


class Caller:
    """Has submitted something so long ago, in seconds, at each look."""

    def __init__(self, *quiet: float) -> None:
        self.looks = iter(quiet)

    def quiet_s(self) -> float:
        return next(self.looks)


@pytest.fixture
def control() -> Iterator[Control]:
    fd = create_memfd("horovod-test", Control.nbytes(2))
    page = Control(fd, 0, 2, cores=2)
    os.close(fd)
    page.words32[page.mode[0]] = PARKED
    yield page
    page.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def _background(caller: Caller, control: Control) -> Progress:
    stepper: Any = caller
    channel: Any = None
    return Progress(stepper, channel, ShmDoorbell(control))


def test_a_caller_that_has_stopped_submitting_is_not_waited_for(control: Control, pauses: list[float]) -> None:
    _background(Caller(1.0), control)._let_the_caller_submit(ShmDoorbell(control))
    assert not pauses
    assert control.words32[control.mode[0]] == PARKED


def test_the_pause_ends_when_the_caller_could_have_been_quiet_for_long_enough(
    control: Control, pauses: list[float]
) -> None:
    wanted = progress._QUIET_S
    _background(Caller(wanted / 4, wanted / 2, wanted), control)._let_the_caller_submit(ShmDoorbell(control))
    assert pauses == pytest.approx([wanted * 3 / 4, wanted / 2])
    # Who rings meanwhile need not wake anybody.
    assert control.words32[control.mode[0]] == 0


def test_the_mode_belongs_to_who_waits_for_a_result(control: Control, pauses: list[float]) -> None:
    background = _background(Caller(0.0, 1.0), control)
    assert background.exclusively(0)
    background._let_the_caller_submit(ShmDoorbell(control))
    assert len(pauses) == 1
    assert control.words32[control.mode[0]] == PARKED
    background.release()


def test_a_caller_that_never_stops_is_not_waited_for_for_ever(control: Control, pauses: list[float]) -> None:
    _background(Caller(*[0.0] * 1000), control)._let_the_caller_submit(ShmDoorbell(control))
    assert 0.001 < sum(pauses) < 0.1


def test_a_job_that_ends_is_not_held_up(control: Control, pauses: list[float]) -> None:
    background = _background(Caller(0.0), control)
    assert background.stop(1.0)
    background._let_the_caller_submit(ShmDoorbell(control))
    assert not pauses
