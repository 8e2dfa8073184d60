"""The events of an operation in the trace."""

from __future__ import annotations

import json
from typing import Any

from horovod.core.requests import Kind, ReduceOp, Request, TensorSpec
from horovod.timeline.events import Events, Span
from horovod.timeline.file import MOST_BYTES

REQUEST = Request("allreduce.w", Kind.ALLREDUCE, 0, (TensorSpec("float32", (2, 3)),), site="train.py:7")


def events_of(*spans: Span, rank: int = 0, marks: bool = False) -> list[dict[str, Any]]:
    events = Events(rank, f"rank {rank}", 1_000_000, lambda process_set: marks)
    for span in spans:
        events.add(span)
    return parsed(events)


def parsed(events: Events) -> list[dict[str, Any]]:
    """The events; a block of them is the inside of an array."""
    return [event for block in events.take() for event in json.loads(b"[" + block + b"]")]


def span(request: Request = REQUEST, start: int = 1_000_000, sequence: int = 1, **more: Any) -> Span:
    """Submitted at ``start``, ready 2, begun 3, done 10 microseconds later; all of it waited for from 1 on."""
    values = {
        "submitted": start,
        "waited": start + 1000,
        "started": start + 3000,
        "ended": start + 10_000,
        "together": 1,
        "error": None,
        "ready": start + 2000,
        "last": 1,
    }
    return Span(request=request, sequence=sequence, **{**values, **more})  # type: ignore[arg-type]


def slices(events: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Row, name, begin and end of every slice."""
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(rows[e["tid"]], e["name"], e["ts"], round(e["ts"] + e["dur"], 3)) for e in events if e["ph"] == "X"]


def test_an_operation_in_horovods_words() -> None:
    events = events_of(span(), rank=2)
    assert slices(events) == [
        ("allreduce.w", "NEGOTIATE_ALLREDUCE", 0.0, 1.999),
        ("allreduce.w", "QUEUE", 2.0, 2.999),
        ("allreduce.w", "ALLREDUCE", 3.0, 9.999),
        ("waiting", "allreduce.w", 1.0, 9.999),
        ("engine", "ALLREDUCE", 3.0, 9.999),
    ]
    assert {e["pid"] for e in events} == {3}
    [args] = [e["args"] for e in events if e["name"] == "ALLREDUCE" and "bytes" in e["args"]]
    assert args == {"dtype": "float32", "shape": "[2, 3]", "bytes": 24, "set": 0, "site": "train.py:7", "seq": 1}


def test_what_is_executed_together_is_one_execution() -> None:
    other = Request("allreduce.v", Kind.ALLREDUCE, 0, REQUEST.tensors)
    events = events_of(span(together=2), span(other, together=2))
    engine = [e for e in events if e["ph"] == "X" and "together" in e["args"]]
    assert [(e["name"], e["args"]["together"]) for e in engine] == [("ALLREDUCE", 2)]


def test_cycles_are_marked_if_wanted() -> None:
    assert not [e for e in events_of(span()) if e["name"] == "CYCLE_START"]
    [mark] = [e for e in events_of(span(), marks=True) if e["name"] == "CYCLE_START"]
    assert (mark["ph"], mark["s"], mark["ts"]) == ("i", "g", 3.0)


def test_a_failure_is_told() -> None:
    never = span(started=0, sequence=0, error='no "rank" 1')
    [only] = [e for e in events_of(never) if e["ph"] == "X"]
    assert (only["name"], only["args"]["error"]) == ("NEGOTIATE_ALLREDUCE", 'no "rank" 1')


def test_without_knowledge_of_the_others_there_is_no_queue() -> None:
    assert [name for _, name, _, _ in slices(events_of(span(ready=0, waited=0)))] == [
        "NEGOTIATE_ALLREDUCE",
        "ALLREDUCE",
        "ALLREDUCE",
    ]


def test_every_box_of_the_last_rank_has_a_length() -> None:
    tensor = [s for s in slices(events_of(span(ready=1_000_000))) if s[0] == "allreduce.w"]
    assert [(name, begin, end) for _, name, begin, end in tensor] == [
        ("NEGOTIATE_ALLREDUCE", 0.0, 0.001),
        ("QUEUE", 0.002, 2.999),
        ("ALLREDUCE", 3.0, 9.999),
    ]


def test_unnamed_operations_that_overlap_get_rows_of_their_own() -> None:
    unnamed = Request("", Kind.ALLGATHER, 0, REQUEST.tensors)
    events = events_of(span(unnamed), span(unnamed, start=1_005_000, sequence=2), span(unnamed, 2_000_000, 3))
    rows = [row for row, name, _, _ in slices(events) if name == "ALLGATHER" and row != "engine"]
    assert rows == ["allgather.noname", "allgather.noname (2)", "allgather.noname"]


def test_adasum_has_its_own_name() -> None:
    adasum = Request("allreduce.w", Kind.ALLREDUCE, 0, REQUEST.tensors, op=ReduceOp.ADASUM)
    assert "NEGOTIATE_ADASUM" in [name for _, name, _, _ in slices(events_of(span(adasum)))]


def test_any_name_will_do() -> None:
    odd = 'allreduce.100% "sure" %s %d \\ \n é'
    events = events_of(span(Request(odd, Kind.ALLREDUCE, 0, REQUEST.tensors, site='a "%d".py:1')))
    assert {row for row, *_ in slices(events)} == {odd, "engine", "waiting"}
    [site] = [e["args"]["site"] for e in events if "site" in e.get("args", {})]
    assert site == 'a "%d".py:1'


def test_rows_are_not_endless() -> None:
    many = [
        span(Request(f"allreduce.{i}", Kind.ALLREDUCE, 0, REQUEST.tensors), 1_000_000 + i * 20_000, i)
        for i in range(2500)
    ]  # fmt: skip
    rows = {row for row, *_ in slices(events_of(*many))}
    assert len(rows) < 2010
    assert "more names" in rows


def test_no_event_is_too_long_for_the_file() -> None:
    long = Request("allreduce." + "ä" * 9000, Kind.ALLREDUCE, 0, REQUEST.tensors * 900, site="s" * 9000)
    events = Events(0, "rank 0", 0, lambda process_set: False)
    events.add(span(long, error="e" * 9000))
    texts = events.take()
    assert max(map(len, texts)) <= MOST_BYTES
    assert all(json.loads(b"[" + text + b"]") for text in texts)


def test_slices_of_a_row_never_overlap() -> None:
    spans = [span(start=1_000_000 + i * 10_001, sequence=i + 1) for i in range(300)]
    ends: dict[str, float] = {}
    for row, _, begin, end in slices(events_of(*spans)):
        assert begin >= ends.get(row, 0.0)
        ends[row] = end
