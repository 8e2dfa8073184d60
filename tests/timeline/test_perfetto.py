"""Perfetto's own trace processor reads what real ranks recorded, and agrees on what it says."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Ranks, run_ranks
from perfetto_sql import Perfetto

STEPS = 5
ROWS = """
    CREATE PERFETTO VIEW boxes AS
    SELECT process.pid - 1 AS rank, thread.name AS "row", slice.name, ts, ts + dur AS until, dur, depth, track_id,
           EXTRACT_ARG(slice.arg_set_id, 'args.seq') AS seq, EXTRACT_ARG(slice.arg_set_id, 'args.last') AS last
    FROM slice JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
"""


def _train(steps: int) -> None:
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 20)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        hvd.allreduce(loss.detach(), name="loss")


def _train_for_ever() -> None:
    while True:
        _train(STEPS)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Perfetto]:
    """A few steps of two ranks, loaded."""
    path = tmp_path_factory.mktemp("perfetto") / "t.json"
    run_ranks(2, _train, STEPS, env={"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"})
    with Perfetto(path) as perfetto:
        perfetto.query(ROWS)
        yield perfetto


def _no_complaints(trace: Perfetto) -> None:
    """It understood every event, and dropped none."""
    bad = "severity IN ('error', 'data_loss') AND value > 0"
    assert trace.query(f"SELECT name, value FROM stats WHERE {bad}") == []


def _nothing_overlaps(trace: Perfetto) -> None:
    """Boxes that overlap in a row are dropped, or drawn one below the other."""
    assert trace.query("SELECT name, ts, depth FROM slice WHERE depth > 0") == []
    assert trace.query("SELECT name, ts FROM slice WHERE dur < 0") == [], "without an end"


def test_every_event_is_understood(trace: Perfetto) -> None:
    _no_complaints(trace)
    _nothing_overlaps(trace)
    assert trace.query("SELECT str_value FROM metadata WHERE name = 'trace_type'") == [("json",)]


def test_every_rank_is_a_process_with_its_rows(trace: Perfetto) -> None:
    ranks = trace.query("SELECT pid, name FROM process WHERE pid > 0 ORDER BY pid")
    assert [(pid, name.split(" (")[0]) for pid, name in ranks] == [(1, "rank 0"), (2, "rank 1")]
    for pid in (1, 2):
        threads = "thread_track JOIN thread USING (utid) JOIN process USING (upid)"
        rows = trace.query(f"SELECT thread.name FROM {threads} WHERE pid = {pid} ORDER BY tid")
        assert rows[:2] == [("engine",), ("waiting",)]
        assert ("allreduce.loss",) in rows and ("broadcast.0.weight",) in rows
    assert trace.query("SELECT COUNT(*) FROM thread_track LEFT JOIN slice ON track_id = thread_track.id "
                       "WHERE slice.id IS NULL") == [(0,)], "no empty row"  # fmt: skip


def test_every_rank_has_every_box(trace: Perfetto) -> None:
    for rank in (0, 1):
        found = trace.query(f"SELECT name FROM boxes WHERE rank = {rank} AND row = 'allreduce.loss' ORDER BY ts")
        assert [name for (name,) in found if name != "QUEUE"] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * STEPS
        gradients = f"rank = {rank} AND row GLOB 'allreduce.DistributedOptimizer.*' AND name = 'ALLREDUCE'"
        assert trace.query(f"SELECT COUNT(*) >= {STEPS} FROM boxes WHERE {gradients}") == [(1,)]
        waits = f"rank = {rank} AND row = 'waiting' AND name = 'allreduce.loss'"
        # An operation that ended before anybody waited for it has no box there.
        [(count,)] = trace.query(f"SELECT COUNT(*) FROM boxes WHERE {waits}")
        assert 0 < count <= STEPS
    [(executions, marks)] = trace.query(
        "SELECT (SELECT COUNT(*) FROM boxes WHERE rank = 0 AND row = 'engine'), "
        "(SELECT COUNT(*) FROM slice WHERE name = 'CYCLE_START')"
    )
    assert executions == marks > 2 * STEPS


def test_an_operation_is_the_same_moment_on_both_ranks(trace: Perfetto) -> None:
    """Nobody begins before the last has come, on one clock, and who came last is right."""
    pairs = """
        FROM boxes a JOIN boxes b ON a.seq = b.seq AND a.row = b.row AND a.rank = 0 AND b.rank = 1
        WHERE a.name GLOB 'NEGOTIATE_*' AND b.name GLOB 'NEGOTIATE_*'
    """
    apart = "ABS(a.until - b.until) > 5 AND a.last >= 0 AND b.last >= 0"
    assert trace.query(f"SELECT a.row, a.until, b.until {pairs} AND {apart}") == []
    wrong = "a.last = b.last AND a.last = (CASE WHEN a.ts > b.ts THEN 1 ELSE 0 END) AND a.ts != b.ts"
    assert trace.query(f"SELECT a.row, a.last, a.ts, b.ts {pairs} AND {wrong}") == []
    early = "SELECT x.name FROM boxes x JOIN boxes n ON x.seq = n.seq AND x.row = n.row WHERE x.ts < n.ts AND "
    assert trace.query(f"{early} n.name GLOB 'NEGOTIATE_*' AND x.name NOT GLOB 'NEGOTIATE_*'") == []


def _boxes(path: Path) -> list[int]:
    """How many executions of either rank are in the file so far."""
    events = path.read_bytes().splitlines() if path.exists() else []
    mine = [event for event in events if b'"name":"ALLREDUCE"' in event]
    return [sum(b'"pid":%d,' % pid in event for event in mine) for pid in (1, 2)]


@pytest.mark.slow
def test_a_recording_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    ranks = Ranks(2, _train_for_ever, env={"HOROVOD_TIMELINE": str(path)})
    while min(_boxes(path)) < 100:
        assert all(process.is_alive() for process in ranks.processes)
    for process in ranks.processes:
        process.kill()
    assert {outcome.exitcode for outcome in ranks.outcomes()} == {-signal.SIGKILL}
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]
    with Perfetto(path) as perfetto:
        perfetto.query(ROWS)
        _no_complaints(perfetto)
        _nothing_overlaps(perfetto)
        found = perfetto.query("SELECT rank, COUNT(*) > 50 FROM boxes WHERE name = 'ALLREDUCE' GROUP BY rank")
        assert found == [(0, 1), (1, 1)]
