"""The operations that one rank finds in its ring."""

from __future__ import annotations

import json

import pytest

from horovod.core.requests import Kind, Request
from horovod.engine.board import TimelineSession
from horovod.engine.times import CAPACITY, ENDED, SEQUENCE, STARTED, Ring, Times, new_ring
from horovod.observe.recording import Recording
from horovod.timeline.events import CYCLE

REQUEST = Request("allreduce.w", Kind.ALLREDUCE)


def new_recording(ring: Ring, members: tuple[int, ...] = (0,), mark_cycles: bool = False) -> Recording:
    """Of rank 0, from the beginning on."""
    return Recording(0, ring, TimelineSession(1, mark_cycles, 1, 0, 0), lambda process_set: members, None)


def submit(ring: Ring, number: int, is_done: bool = True) -> Times:
    """One operation."""
    record = [REQUEST, 1000 * number + 1, 0, 0, 0, 0, 0, None]
    ring.append(record)
    if is_done:
        end(record, number)
    return record


def end(record: Times, number: int) -> None:
    """It is executed, and done."""
    record[STARTED], record[SEQUENCE], record[ENDED] = 1000 * number + 2, number, 1000 * number + 900


def names(blocks: list[bytes]) -> list[str]:
    """Of what is not metadata."""
    return [event["name"] for block in blocks for event in json.loads(b"[" + block + b"]") if event["ph"] != "M"]


def sequences(blocks: list[bytes]) -> list[int]:
    """The operations of which the events tell."""
    events = [event for block in blocks for event in json.loads(b"[" + block + b"]")]
    return [event["args"]["seq"] for event in events if event["name"].startswith("NEGOTIATE")]


def test_each_operation_is_told_once_whenever_it_is_done() -> None:
    ring = new_ring()
    recording = new_recording(ring)
    told = []
    slow = submit(ring, 1, is_done=False)
    for number in range(2, 400):
        submit(ring, number)
        if number % 7 == 0:
            told += sequences(recording.look())
        if number == 300:
            end(slow, 1)
    told += sequences(recording.last_look())
    assert sorted(told) == list(range(1, 400))


def test_looking_again_finds_nothing() -> None:
    ring = new_ring()
    recording = new_recording(ring)
    assert sequences(recording.look()) == []
    submit(ring, 1)
    recording.look()
    assert sequences(recording.look()) == [1]
    assert recording.look() == [] and not recording.is_hungry


def test_operations_that_were_displaced_leave_a_mark() -> None:
    ring = new_ring()
    recording = new_recording(ring)
    submit(ring, 1)
    recording.look()
    for number in range(2, CAPACITY + 20):
        submit(ring, number)
    assert "operations are missing here" in names(recording.look())
    assert sequences(recording.last_look())[-1] == CAPACITY + 19


@pytest.mark.parametrize(("members", "marks"), [((0, 1), 1), ((1, 2), 0), ((), 0)], ids=["first", "other", "removed"])
def test_the_first_rank_of_a_process_set_marks_what_it_executes(members: tuple[int, ...], marks: int) -> None:
    ring = new_ring()
    recording = new_recording(ring, members, mark_cycles=True)
    submit(ring, 1)
    assert names(recording.last_look()).count(CYCLE) == marks
