"""Frames between hosts, and what the time of another host is: pure."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.core.requests import Kind, Response
from horovod.engine.board import TimelineSession
from horovod.links.hosts import frames
from horovod.links.hosts.traces import Clock

MESSAGES: list[frames.Message] = [
    frames.RankState(3, 4, 2, "killed", b"why"), frames.RankState(0, 1), frames.Question(1, 2, 3, 4),
    frames.Leave(7, "bye"), frames.LogEntry((3, 4)), frames.LogEntry((5,), (1, 2)),
    frames.LogEntry((6,), response=Response(Kind.BARRIER, "", 0, (0, 1))),
    frames.Answer(1, 2, 3, b"stack"), frames.Kernel(1, 2, "R", 0.5),
    frames.StartTrace(TimelineSession(1, True, 2, 3, 4)),
    frames.Trace(1, b"{}"), frames.Told(1, 2), frames.Ping(5), frames.Pong(5, 6), frames.Bye(),
]  # fmt: skip
PACKED = frames.numbered(7, frames.encode(MESSAGES))


def test_messages_arrive_as_they_were_sent() -> None:
    assert frames.number_of(PACKED) == 7
    assert frames.decode(PACKED) == MESSAGES


@pytest.mark.parametrize(
    "message",
    [
        [6, 1 << 24, 1], [6, -1, 1], [6, 1, 9], [6, 1.5, 1], [9, 1, 2, "RR", 0.0], [8, 1, 2, 3, bytes((1 << 20) + 1)],
        [99], [], [14, "text"], [7, 1, 2, 256, 0], {"tag": 6}, None,
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_its_type_is_no_frame(message: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        frames.decode(frames.numbered(0, msgspec.msgpack.encode([message])))


def test_too_many_messages_are_no_frame() -> None:
    too_many = [frames.Ping(0)] * (frames.MAX_ITEMS + 1)
    assert len(frames.decode(frames.numbered(0, frames.encode(too_many[1:])))) == frames.MAX_ITEMS
    with pytest.raises(ValueError, match="length"):
        frames.decode(frames.numbered(0, frames.encode(too_many)))


@given(st.binary(max_size=200), st.integers(0, len(PACKED)), st.integers(0, 20))
def test_garbage_is_a_value_error_and_nothing_else(garbage: bytes, start: int, length: int) -> None:
    for data in (garbage, PACKED[:start], PACKED[:start] + garbage[:length] + PACKED[start + length :]):
        try:
            assert isinstance(frames.decode(data), list)
        except ValueError:
            pass
        assert frames.number_of(data) == (int.from_bytes(data[:8], "little") if len(data) >= 8 else -1)


def test_the_quickest_round_trip_tells_how_far_the_other_clock_is() -> None:
    clock = Clock()
    clock.note(1000, 51_500, 2000)  # as long there as back: exact
    assert (clock.offset_ns, clock.samples) == (50_000, 1)
    clock.note(3000, 60_000, 13_000)  # slow, most of it on the way back
    assert clock.offset_ns == 50_000
    clock.note(20_000, 70_400, 20_800)
    assert clock.offset_ns == 50_000
    clock.note(30_000, 80_420, 30_840)  # nearly as quick as the best one, so a drift is followed
    assert clock.offset_ns == 50_000
    clock.note(40_000, 90_500, 40_800)
    assert clock.offset_ns == 50_100
    assert clock.samples == 5


def test_a_clock_that_is_behind_and_one_that_jumps_back() -> None:
    clock = Clock()
    clock.note(10_000, 5_500, 11_000)
    assert clock.offset_ns == -5_000
    clock.note(12_000, 0, 11_000)  # an answer before its question says nothing
    assert (clock.offset_ns, clock.samples) == (-5_000, 1)
    for _ in range(3):
        clock.note(20_000, 21_000, 20_000)  # in no time
    assert clock.offset_ns == 1_000
