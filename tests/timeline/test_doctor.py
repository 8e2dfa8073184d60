"""The doctor's reports on dumps made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod.core.requests import Kind, Request, TensorSpec
from horovod.launch.cli import main
from horovod.timeline.doctor import diagnose, examine
from horovod.timeline.dumps import SCRIPT_ENDED, VERSION, Dump, Operation, PendingOperation, Wait, write

SECOND = 1_000_000_000
LARGE = (TensorSpec("float32", (9,)),)


def call(name: str, **more: Any) -> Request:
    wire_name, site = f"allreduce.{name}" if name else "", f"{name or 'unnamed'}.py:1"
    values = {"tensors": (TensorSpec("float32", (3,)),), "site": site, **more}
    return Request(wire_name, Kind.ALLREDUCE, **values)


def op(
    name: str, sequence: int = 0, ended: bool = True, members: tuple[int, ...] = (0, 1, 2), **more: Any
) -> Operation:
    """An allreduce of three ranks; with a sequence it was begun, and then ended unless told otherwise."""
    at_ns, ended_ns = (sequence or 90) * SECOND, sequence * SECOND if ended else 0
    return Operation(call(name, **more), members, at_ns, 0, sequence, sequence * SECOND, ended_ns)


def dump(rank: int, *operations: Operation, wait: str = "", **more: object) -> Dump:
    """The dump of a rank that waits in ``wait``, or computes."""
    values: dict[str, object] = {
        "version": VERSION,
        "job": "j",
        "rank": rank,
        "size": 3,
        "host": "here",
        "pid": 100 + rank,
        "reason": "SIGUSR1",
        "time_s": 1000.0 + rank / 10,
        "clock_ns": 100 * SECOND,
        "position": max((o.sequence for o in operations), default=0),
        "failure": "",
        "wait": Wait(call(wait), False) if wait else None,
        "stack": ['File "train.py", line 7, in compute', "  x = slow()"],
        "threads": {},
        "pending": [],
        "operations": list(operations),
    }
    return Dump(**{**values, **more})  # type: ignore[arg-type]


def report(*dumps: Dump) -> str:
    return "\n".join(diagnose(dumps))


def test_a_healthy_job() -> None:
    text = report(*(dump(rank, op("a", 1)) for rank in range(3)))
    assert "dumps of ranks 0, 1, 2, written within 0.2 s" in text
    assert "\nRanks 0, 1, 2: SIGUSR1\n" in text
    assert "Nothing is wrong here" in text


def test_a_rank_that_did_not_submit_is_named_with_its_stack() -> None:
    waiting = [dump(rank, op("a", 1), op("b"  , ended=False), wait="b") for rank in (0, 2)]  # fmt: skip
    text = report(waiting[0], dump(1, op("a", 1)), waiting[1])
    assert "* allreduce 'b' (b.py:1) waited for 10.0 s: submitted by ranks 0, 2, not by rank 1." in text
    assert 'Rank 1 was in other code; its main thread:\n      File "train.py", line 7, in compute' in text
    assert "0     100  1          1          allreduce 'a'  waiting in allreduce 'b' (b.py:1)" in text


def test_what_a_rank_finished_after_the_dump_of_another_was_not_missing() -> None:
    text = report(
        dump(0, op("a", 1), op("b", ended=False)), dump(1, op("a", 1), op("b", 2)), dump(2, op("a", 1), op("b", 2))
    )
    assert "* allreduce" not in text


def test_two_orders() -> None:
    text = report(
        dump(0, op("x", ended=False), wait="x"),
        dump(1, op("y", ended=False), wait="y"),
        dump(2, op("x", ended=False), wait="x"),
    )
    assert "allreduce 'x' (x.py:1) waited for 10.0 s: submitted by ranks 0, 2, not by rank 1" in text
    assert "allreduce 'y' (y.py:1) waited for 10.0 s: submitted by rank 1, not by ranks 0, 2" in text


def test_unnamed_operations_in_two_orders() -> None:
    small, large = op("", ended=False, site="small.py:1"), op("", ended=False, site="large.py:1", tensors=LARGE)
    text = report(dump(0, small, large), dump(1, large), dump(2, small))
    assert "the orders differ" in text
    assert "rank 0: allreduce (unnamed) (small.py:1) of [[3]]" in text
    assert "rank 1: allreduce (unnamed) (large.py:1) of [[9]]" in text
    assert "Give them names" in text


def test_a_rank_without_a_dump() -> None:
    waiting = op("b", ended=False)
    pending = [PendingOperation(call("b"), [0, 1], [2])]
    text = report(dump(0, waiting, pending=pending), dump(1, waiting))
    assert "There is no dump of rank 2: it was killed or stopped, ended by itself, or could not run Python" in text
    assert "submitted by ranks 0, 1, not by rank 2." in text


def test_a_rank_without_a_dump_of_which_nothing_is_known() -> None:
    assert "not known of rank 2." in report(dump(0, op("b", ended=False)), dump(1, op("b", ended=False)))


def test_in_the_middle_of_an_operation() -> None:
    inside = [dump(rank, op("b", 5, ended=False), position=5) for rank in (0, 2)]
    text = report(inside[0], dump(1, op("b", ended=False), position=3), inside[1])
    assert "* allreduce 'b' (b.py:1) was under way (log entry 5) on ranks 0, 2." in text
    assert "Rank 1 had not come to it, it was 2 log entries behind; its main thread:" in text
    assert "submitted by" not in text


def test_the_first_failure_comes_first() -> None:
    text = report(
        dump(0, failure="because of rank 2", reason="PeerLostError", time_s=9.0),
        dump(1, failure="because of rank 2, too", reason="PeerLostError", time_s=8.0),
        dump(2, failure="out of memory\nreally", reason="HorovodInternalError", time_s=7.0),
    )
    assert "* Rank 2 failed first:\n    out of memory\n    really\n    (ranks 1, 0 failed afterwards.)" in text


def test_a_stall_is_told_once() -> None:
    failure = "rank 1 is stopped by a signal\n(limit: X=4)"
    stalled = [
        dump(rank, op("b", ended=False), wait="b", failure=failure, reason="StallError", time_s=float(rank))
        for rank in (0, 2)
    ]
    text = report(stalled[0], dump(1, op("a", 1)), stalled[1])
    assert "* Rank 0 gave up first:\n    (limit: X=4)\n    (rank 2 gave up afterwards.)" in text
    assert "submitted by ranks 0, 2, not by rank 1." in text
    assert "stopped by a signal" in report(*stalled), "what only the ranks knew that were there"


def test_ranks_whose_scripts_ended() -> None:
    text = report(*(dump(rank, failure="ValueError: no", reason=SCRIPT_ENDED) for rank in (0, 1, 2)))
    assert text.count("at the end of its script") == 3


def test_another_process_set() -> None:
    inner = op("inner", ended=False, process_set=3, members=(1, 2))
    text = report(dump(0), dump(1, inner), dump(2))
    assert (
        "allreduce 'inner' (inner.py:1) of process set 3 (ranks [1, 2]) waited for 10.0 s: submitted by rank 1" in text
    )


def test_files_of_the_last_job_are_read_and_others_are_mentioned(tmp_path: Path) -> None:
    write(dump(0, op("a", 1), size=2), tmp_path)
    write(dump(1, op("a", 1), size=2), tmp_path)
    write(dump(2, job="older", time_s=1.0), tmp_path)
    (tmp_path / "rank-9.json").write_text("{")
    lines, found = examine(tmp_path)
    assert found
    assert "Job of 2 ranks on here; dumps of ranks 0, 1, written within 0.1 s." in lines
    assert "(rank-2.json is of another, older job)" in lines
    assert any(line.startswith("(rank-9.json cannot be read") for line in lines)
    assert not list(tmp_path.glob(".*"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--doctor", str(tmp_path)]) == 2
    assert "no dump of a flight recorder" in capsys.readouterr().out
    write(dump(0, size=1), tmp_path)
    assert main(["--doctor", str(tmp_path)]) == 0
    assert "Nothing is wrong here" in capsys.readouterr().out


def test_dumps_of_an_earlier_generation_are_kept_and_explained(tmp_path: Path) -> None:
    first = [dump(rank, op("x", 3, ended=rank == 0), failure="rank 2 was killed" if rank else "") for rank in (0, 1)]
    for each in (*first, dump(0, op("y", 1), size=2, generation=2, time_s=1009.0)):
        write(each, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank-0-generation-2.json", "rank-0.json", "rank-1.json"
    ]  # fmt: skip
    lines, is_there = examine(tmp_path)
    assert is_there
    second = lines.index("Generation 2 of the job's members:")
    assert lines[0] == "Generation 1 of the job's members:"
    assert lines[2 : second - 1] == diagnose(first)
    assert lines[second + 2].startswith("Job of 2 ranks")
