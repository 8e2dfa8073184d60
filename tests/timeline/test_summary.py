"""Tables of a timeline whose times were chosen by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod.core.requests import Kind, Request, TensorSpec
from horovod.timeline.__main__ import main
from horovod.timeline.events import Events, Span
from horovod.timeline.file import TraceFile
from horovod.timeline.read import read
from horovod.timeline.summary import Summary, summarise

MS = 1_000_000
STEPS, STEP_MS = 4, 20
GRADIENT = Request("allreduce.gradient", Kind.ALLREDUCE, 0, (TensorSpec("float32", (250_000,)),), site="a/train.py:7")
LOSS = Request("allreduce.loss", Kind.ALLREDUCE, 0, (TensorSpec("float32", (1,)),), site="a/train.py:9")


def steps_of(rank: int) -> list[Span]:
    """In each step of 20 ms rank 0 submits the gradient at 0 and waits for it from 4 to 10, of which rank 1, which
    submits at 6, is to blame for 2; 8 to 9 it is queued; 9 to 10 executed. The loss, 12 to 13, is waited for."""
    spans = []
    for step in range(STEPS):
        at = step * STEP_MS * MS
        submitted = at + (0 if rank == 0 else 6) * MS
        gradient = Span(
            GRADIENT, submitted, max(at + 4 * MS, submitted), 2 * step + 1, at + 9 * MS, at + 10 * MS, 1, None,
            ready=at + 6 * MS, last=1,
        )  # fmt: skip
        loss = Span(
            LOSS, at + 12 * MS, at + 12 * MS, 2 * step + 2, at + 12 * MS, at + 13 * MS, 1, None,
            ready=at + 12 * MS, last=rank,
        )  # fmt: skip
        spans += [gradient, loss]
    return spans


def write(folder: Path, *ranks: list[Span]) -> Path:
    """Write the timeline of some ranks."""
    trace = TraceFile(folder / "t.json", Events.first(0))
    for rank, spans in enumerate(ranks):
        events = Events(rank, f"rank {rank}", 0, lambda process_set, rank=rank: rank == 0)  # type: ignore[misc]
        for span in spans:
            events.add(span)
        trace.append(events.take())
    trace.finish()
    return trace.path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The timeline."""
    return write(tmp_path, steps_of(0), steps_of(1))


@pytest.fixture
def summary(path: Path) -> Summary:
    return summarise(read(path))


def test_operations_come_back_as_they_were(path: Path) -> None:
    ranks = read(path)
    assert sorted(ranks) == [0, 1]
    op = ranks[1].ops[2]
    assert (op.name, op.kind, op.sequence, op.last, op.bytes, op.site) == (
        "allreduce.gradient", "ALLREDUCE", 3, 1, 1_000_000, "a/train.py:7"
    )  # fmt: skip
    times = (op.submitted, op.ready, op.started, op.ended, op.waited)
    assert times == pytest.approx((26_000, 26_000, 29_000, 30_000, 26_000), abs=0.01)


def test_steps(summary: Summary) -> None:
    assert summary.anchor == "allreduce.gradient"
    mine = [step for step in summary.steps if step.rank == 0]
    assert len(mine) == STEPS - 1, "the last one has no end"
    for step in mine:
        values = (step.total_ms, step.compute_ms, step.for_ranks_ms, step.for_data_ms, step.communication_ms)
        assert values == pytest.approx((20, 13, 2, 5, 2), abs=0.01)
        assert step.exposed_ms == pytest.approx(7, abs=0.01)
        assert step.overlap == pytest.approx(0, abs=0.01)


def test_stragglers(summary: Summary) -> None:
    first, second = summary.ranks
    assert (first.rank, second.rank) == (0, 1)
    assert second.last >= 0.5
    assert second.delay_ms == pytest.approx(6 * STEPS / (STEPS - 1), abs=0.01)
    assert first.delay_ms == 0
    assert second.mean.for_ranks_ms == pytest.approx(0, abs=0.01)


def test_tensors(summary: Summary) -> None:
    gradient, loss = summary.tensors
    assert (gradient.name, gradient.count, gradient.bytes) == ("allreduce.gradient", STEPS, 1_000_000)
    assert (gradient.negotiate_ms, gradient.queue_ms) == pytest.approx((3, 3), abs=0.01)
    assert (gradient.execute_ms, gradient.exposed_ms) == pytest.approx((1, 5), abs=0.01)
    assert loss.name == "allreduce.loss"


def test_communication_that_nobody_waits_for_is_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = []
    for step in range(3):
        at = step * 10 * MS
        spans.append(Span(GRADIENT, at, at + 5 * MS, step + 1, at + 2 * MS, at + 6 * MS, 1, None, at + MS, 0))
    path = write(tmp_path, spans)
    [first, _] = summarise(read(path)).steps
    assert (first.communication_ms, first.overlap) == pytest.approx((4, 0.75), abs=0.01)
    assert main([str(path)]) == 0
    assert "For 1.00 ms of an average step of 10.00 ms communication is waited for" in capsys.readouterr().out


def test_a_name_may_hold_anything(tmp_path: Path) -> None:
    """Overlapping operations of one name have rows ``name (2)``; that is not to be cut off a name as it is."""
    spans = []
    odd = Request("allreduce.w (of 2)", Kind.ALLREDUCE, 0, (TensorSpec("float32", (1,)),))
    for sequence in (1, 2):
        spans.append(Span(odd, sequence * MS, 0, sequence, 3 * MS, 4 * MS, 1, None, 2 * MS, 0))
    assert [op.name for op in read(write(tmp_path, spans))[0].ops] == ["allreduce.w (of 2)"] * 2


def test_a_step_is_what_most_names_do_once_in(tmp_path: Path) -> None:
    """Something that is called more often, or once in a while, is not a measure."""
    spans = []
    sequence = 0
    for step in range(6):
        for k, name in enumerate(["often", "often", "often", "w1", "w2"] + ["rare"] * (step % 3 == 0)):
            sequence += 1
            at = step * 10 * MS + k * MS
            request = Request(f"allreduce.{name}", Kind.ALLREDUCE, 0, (TensorSpec("float32", (1,)),))
            spans.append(Span(request, at, at, sequence, at, at + 1000, 1, None, at, 0))
    assert summarise(read(write(tmp_path, spans))).anchor == "allreduce.w1"


def test_nothing_repeated_is_one_step(tmp_path: Path) -> None:
    failed = Span(GRADIENT, 0, 0, 0, 0, 5 * MS, 0, "rank 1 died")
    spans = [failed, Span(LOSS, MS, MS, 1, 2 * MS, 3 * MS, 1, None, 2 * MS, 0)]
    summary = summarise(read(write(tmp_path, spans)))
    assert summary.anchor == ""
    assert [step.number for step in summary.steps] == [0]
    assert summary.errors == ["rank 1 died"]


def test_the_command_prints_tables(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "Rank 1 holds the others up: for " in text
    assert "2 ranks, 8 operations each, 8.0 MB in all" in text
    assert "A step begins where allreduce.gradient is submitted." in text
    words = [line.split() for line in text.splitlines()]
    assert ["0", "20.00", "13.00", "2.00", "5.00", "2.00", "0%"] in [line[:7] for line in words]
    assert ["allreduce.gradient", "4", "1000.0", "3.000", "3.000", "1.000", "1.00", "5.000"] in words


def test_the_command_prints_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path), "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert content["anchor"] == "allreduce.gradient"
    assert len(content["ranks"]) == 2


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_output_that_is_lost_is_one_sentence(
    how: list[str], path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main([str(path), *how]) == 2
    assert capsys.readouterr().err == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("content", ["{", "[]", '[{"name":"x","ph":"M","pid":0}]', '{"a":1}'])
def test_what_is_no_timeline_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "t").write_text(content)
    assert main([str(tmp_path / "t")]) == 2
    assert "is not a timeline" in capsys.readouterr().err


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(path: Path, options: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = [sys.executable, "-m", "horovod.timeline", str(path), *options]
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
