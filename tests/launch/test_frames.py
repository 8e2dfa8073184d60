"""Frames between launcher and agent: whole, after noise, never from a stranger's protocol."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest

from horovod.launch import frames
from horovod.launch.frames import AgentWire, FrameError


@pytest.fixture
def wires() -> Iterator[tuple[AgentWire, AgentWire]]:
    """Launcher and agent."""
    there, back = os.pipe(), os.pipe()
    yield AgentWire(back[0], there[1], is_launcher=True), AgentWire(there[0], back[1], is_launcher=False)
    for fd in (*there, *back):
        os.close(fd)


def test_frames_arrive_after_what_a_shell_prints(wires: tuple[AgentWire, AgentWire]) -> None:
    launcher, agent = wires
    os.write(agent.outgoing, b"Welcome!\n")
    assert list(launcher.receive()) == []
    assert launcher.noise == b"Welcome!\n"
    agent.send(frames.Output(1, "stderr", b"\xff"))
    assert list(launcher.receive()) == [frames.Output(1, "stderr", b"\xff")]
    launcher.send(frames.PassOrder(b"T"))
    assert list(agent.receive()) == [frames.PassOrder(b"T")]


def test_a_frame_longer_than_the_pipe_is_sent_in_parts(wires: tuple[AgentWire, AgentWire]) -> None:
    launcher, agent = wires
    data = os.urandom(1 << 20)
    launcher.send(frames.CallPart(data))
    found: list[object] = []
    while launcher.backlog or not found:
        found += agent.receive()
        launcher.flush()
    assert found == [frames.CallPart(data)]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1\n"], ids=["too long", "no frame"])
def test_what_is_no_frame_is_an_error(wires: tuple[AgentWire, AgentWire], data: bytes) -> None:
    launcher, agent = wires
    os.write(launcher.outgoing, data)
    with pytest.raises(FrameError):
        list(agent.receive())


def test_only_who_has_shown_life_in_vain_is_silent(
    wires: tuple[AgentWire, AgentWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, _ = wires
    monkeypatch.setattr(frames.time, "monotonic", lambda: launcher.alive_at + 100)
    assert not launcher.is_silent(4.0)  # we have slept ourselves
    for _ in range(3):
        launcher.show_life()
    assert launcher.is_silent(4.0)


def test_a_cut_of_two_seconds_is_no_silence() -> None:
    """TCP doubles the time until it sends lost data again: the first try after the cut comes 3.2 s after the data."""
    assert frames.ALIVE_S + 3.2 <= frames.SILENCE_S - 0.5


def test_silence_has_a_moment_at_which_to_look(
    wires: tuple[AgentWire, AgentWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, _ = wires
    heard_at = launcher.heard_at
    for beat in range(1, 4):
        assert launcher.silent_at(4.0) == math.inf
        monkeypatch.setattr(frames.time, "monotonic", lambda at=heard_at + beat: at)
        launcher.show_life()
    assert launcher.silent_at(4.0) == heard_at + 4.0 < launcher.alive_at + 0.5
