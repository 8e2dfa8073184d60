"""The timeline of real ranks: begun by a variable or a call, of all ranks, always complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import LIMIT_S, Ranks, on_ranks, run_ranks
from launching import horovodrun

import horovod.numpy as hvd
from horovod.engine.times import CAPACITY

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    return json.loads(path.read_text())


def rows(events: list[Event]) -> dict[tuple[int, int], str]:
    """Name of each row by process and thread."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def of_tensor(events: list[Event], rank: int, name: str) -> list[Event]:
    """The slices in the row of a tensor."""
    [row] = [row for (pid, row), text in rows(events).items() if pid == rank + 1 and text == name]
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank + 1, row)]


def _a_few() -> None:
    for i in range(3):
        hvd.allreduce(np.arange(3, dtype=np.float32), name="test_allreduce")
        hvd.synchronize(hvd.allgather_async(np.ones((2, 2)), name=f"gather.{i}"))
    hvd.broadcast(np.ones(3), 0)
    hvd.barrier()


def test_horovods_names_are_where_its_tools_look_for_them(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_ranks(2, _a_few, env={"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"})
    text = path.read_text()
    for word in ("start_time_since_epoch_in_micros", "allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "CYCLE_START"):
        assert word in text
    events = load(path)
    assert events[0]["ph"] == "M" and events[0]["pid"] == 0
    for rank in range(2):
        slices = of_tensor(events, rank, "allreduce.test_allreduce")
        names = [e["name"] for e in slices if e["name"] != "QUEUE"]
        assert names == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 3
        done = [e["args"] for e in slices if e["name"] == "ALLREDUCE"]
        assert [(a["dtype"], a["shape"], a["bytes"]) for a in done] == [("float32", "[3]", 12)] * 3
        assert all(a["site"].startswith(__file__) for a in done)
    kinds = {e["name"] for e in events if e["ph"] == "X"}
    assert {"ALLGATHER", "NEGOTIATE_ALLGATHER", "BROADCAST", "BARRIER"} <= kinds


def _dynamic(folder: str) -> list[str]:
    mine = Path(folder) / str(hvd.rank())  # every rank names a file of its own; that of rank 0 counts
    mine.mkdir()
    for number, mark in enumerate((True, False)):
        hvd.start_timeline(mine / f"{number}.json", mark_cycles=mark)
        hvd.allreduce(np.ones(3), name=f"in_{number}")
        hvd.stop_timeline()
        hvd.allreduce(np.ones(3), name=f"after_{number}")
    hvd.stop_timeline()
    return sorted(path.name for path in mine.iterdir())


def test_started_and_stopped_by_hand_without_any_variable(tmp_path: Path) -> None:
    assert run_ranks(2, _dynamic, str(tmp_path)) == [["0.json", "1.json"], []]
    for number, mark in enumerate((True, False)):
        events = load(tmp_path / "0" / f"{number}.json")
        names = set(rows(events).values())
        assert f"allreduce.in_{number}" in names
        assert not [name for name in names if name.startswith("allreduce.after")]
        assert bool([e for e in events if e["name"] == "CYCLE_START"]) is mark
        assert {e["pid"] for e in events if e["ph"] == "X"} == {1, 2}


@on_ranks(2)
def test_events_are_in_the_file_while_the_job_goes_on(tmp_path: Path) -> None:
    """Horovod's tests look into the file a tenth of a second after the operation."""
    hvd.start_timeline(tmp_path / "t.json", mark_cycles=True)
    hvd.allreduce(np.ones(3), name="early")
    deadline = time.monotonic() + LIMIT_S / 2
    while hvd.rank() == 0 and time.monotonic() < deadline:
        events = load(tmp_path / "t.json")
        if {e["pid"] for e in events if e["ph"] == "X"} == {1, 2}:
            break
        time.sleep(0.005)
    hvd.barrier()
    assert time.monotonic() < deadline


@on_ranks(1)
def test_one_rank_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    hvd.start_timeline(path)
    hvd.start_timeline(path)
    hvd.allreduce(np.ones(3), name="x")
    hvd.stop_timeline()
    assert len([e for e in load(path) if e["name"] == "ALLREDUCE"]) == 2


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_an_error_of_init(tmp_path: Path) -> None:
    outcomes = Ranks(1, _a_few, env={"HOROVOD_TIMELINE": str(tmp_path)}).outcomes()
    assert "cannot be written" in str(outcomes[0].error)


def _many(count: int) -> None:
    handles = []
    for i in range(count):
        handles.append(hvd.allreduce_async(np.ones(8, np.float32), name=f"g{i % 50}"))
        if i % 50 == 49:
            for handle in handles:
                hvd.synchronize(handle)
            handles.clear()
        if i % (CAPACITY // 2) == 0:
            _until_the_recording_has_looked()


def _until_the_recording_has_looked() -> None:
    """Wait for its thread, which a machine under load may not let run for a while; more may be lost then."""
    from horovod import context

    engine = context.engine()
    submitted = engine.ring[-1]
    while True:
        keeper = context.observer().tracer._keeper
        if keeper is not None and keeper.recording._last is submitted:
            return
        time.sleep(0.001)


@pytest.mark.slow
def test_nothing_is_lost_under_load(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    run_ranks(2, _many, 20_000, env={"HOROVOD_TIMELINE": str(path)})
    events = load(path)
    assert not [e for e in events if e["name"] == "operations are missing here"]
    for rank in range(2):
        done = [e for e in events if e["pid"] == rank + 1 and e["name"] == "ALLREDUCE" and "bytes" in e["args"]]
        assert len(done) == 20_000


SCRIPT = """
import numpy as np
import horovod.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(3), name="x")
"""


@pytest.mark.slow
def test_the_flag_of_horovodrun(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SCRIPT)
    flags = ["--timeline-filename", str(tmp_path / "t.json"), "--timeline-mark-cycles"]
    ended = horovodrun("-np", "2", *flags, sys.executable, str(tmp_path / "s.py"))
    assert ended.code == 0, ended.err
    assert {e["pid"] for e in load(tmp_path / "t.json") if e["name"] == "CYCLE_START"} == {1}


@pytest.mark.slow
def test_a_rank_that_fails_leaves_a_timeline_of_what_went_before(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SCRIPT + "if hvd.rank() == 1:\n    raise SystemExit(3)\nhvd.barrier()\n")
    environ = {**os.environ, "HOROVOD_TIMELINE": str(tmp_path / "t.json")}
    command = [sys.executable, "-m", "horovod.launch.cli", "-np", "2", sys.executable, str(tmp_path / "s.py")]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=LIMIT_S, text=True)
    assert done.returncode == 3
    assert {e["pid"] for e in load(tmp_path / "t.json") if e["name"] == "ALLREDUCE"} == {1, 2}
