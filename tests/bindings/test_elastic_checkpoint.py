"""The file in which an elastic job leaves its state."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from elastic_double import Arrays, Job, begin_anew

import horovod.numpy as hvd
from horovod import context
from horovod.bindings.elastic import checkpoint, leave
from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.state import ObjectState
from horovod.errors import InitError, PeerLostError


def test_an_attribute_that_a_checkpoint_lacks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    written = ObjectState(lambda value: value, lambda: 0, batch=7).checkpoint()
    state = ObjectState(lambda value: value, lambda: 0, batch=0, best=1.5)
    state.load_checkpoint(written)
    assert (state.batch, state.best) == (7, 1.5)
    assert "the checkpoint has no value of best; the script's own is kept" in caplog.text


def test_an_attribute_stays_the_kind_of_dict_that_it_was(tmp_path: Path) -> None:
    seen, rows = Counter(a=2), defaultdict(list, x=[1])
    written = ObjectState(lambda value: value, lambda: 0, seen=seen, rows=rows)
    found = checkpoint.read(checkpoint.write(str(tmp_path), 1, written.checkpoint()))
    state = ObjectState(lambda value: value, lambda: 0, seen=Counter(b=1), rows=defaultdict(list))
    state.load_checkpoint(found)
    state.seen["c"] += 1
    state.rows["y"].append(2)
    assert (state.seen, state.rows) == (Counter(a=2, c=1), {"x": [1], "y": [2]})


def test_a_checkpoint_of_other_arrays_is_refused_with_the_first_difference() -> None:
    written = Arrays(np.zeros(2), np.zeros((2, 3))).checkpoint()
    for arrays, why in (
        ([np.zeros(2)], "the checkpoint has 2 arrays, and this state 1"),
        ([np.zeros(2), np.zeros((3, 2))], "array 1 has the shape (2, 3) in the checkpoint, and (3, 2) in this state"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            Arrays(*arrays).load_checkpoint(written)


def test_a_number_of_numpy_stays_one(tmp_path: Path) -> None:
    counts = {np.int64(3): np.uint8(2), (np.int32(1), "a"): np.datetime64("2001-01-01")}
    best = np.float32(0.1)
    found = checkpoint.read(checkpoint.write(str(tmp_path), 1, {"counts": counts, "best": best}))
    assert found == {"counts": counts, "best": best}
    assert type(found["best"]) is np.float32


def test_a_file_holds_what_it_was_given_and_runs_no_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "numbers": [1, 2.5, float("inf"), True, None], 3: ("a", b"\x00\xff"), "empty": {}, "deep": {"x": {"y": [()]}},
        "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3).T, np.float64(3.0), np.zeros((0, 2)), np.array("text")],
    }  # fmt: skip
    others = {"code": object(), "list": [object()], "rows": np.zeros(2, [("key", "i4"), ("value", "f8")])}
    path = checkpoint.write(str(tmp_path / "new" / "folder"), 7, {**values, **others})
    assert "code is a object" in caplog.text
    assert "rows is a ndarray of [('key', '<i4'), ('value', '<f8')]" in caplog.text
    assert checkpoint.newest(str(path.parent)) == (path, 7)
    found = checkpoint.read(path)
    np.testing.assert_equal(found, values)
    assert found["arrays"][0].dtype == np.int16
    ml_dtypes = pytest.importorskip("ml_dtypes")
    checkpoint.write(str(path.parent), 8, {"bits": np.ones(3, ml_dtypes.bfloat16)})
    assert checkpoint.read(path.with_name("elastic-000000000008.state"))["bits"].dtype == ml_dtypes.bfloat16
    drafts = [path.with_name(f"elastic-{progress:012d}.state.host.1.part") for progress in (7, 8)]
    for draft in drafts:
        draft.touch()
    checkpoint.write(str(path.parent), 9, {})
    assert [draft.exists() for draft in drafts] == [False, True], "the writer of the first was killed"
    drafts[1].unlink()
    assert [p.name for p in path.parent.iterdir()] == ["elastic-000000000009.state"]
    for damaged in (b"", b"garbage", path.with_name("elastic-000000000009.state").read_bytes()[:-3]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a state of an elastic job"):
            checkpoint.read(path)
    assert checkpoint.newest(str(tmp_path / "nowhere")) is None


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Settings of a job that leaves its state in ``tmp_path``."""
    found = SimpleNamespace(checkpoint_dir=str(tmp_path))
    monkeypatch.setattr(context, "config", lambda: found)
    return found


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_job_that_is_over_leaves_its_state_in_a_file(
    job: Job, tmp_path: Path, settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    monkeypatch.setattr(leave, "_is_asked", is_asked)  # by SIGTERM: all ranks were, or too few would be left
    done: list[str] = []
    hvd.on_leave(lambda: done.append("function"))

    job.answers = [None, InitError("too few ranks are left")]

    def train(state: ObjectState) -> int:
        for state.batch in range(state.batch, 10):
            state.weights += 1
            if state.batch == 4:
                state.commit()
            if state.batch == 6 and job.answers:
                raise PeerLostError("x")
        return state.progress

    def new() -> ObjectState:
        return ObjectState(lambda value: value, lambda: 0, batch=0, weights=np.zeros(3))

    with pytest.raises(SystemExit if is_asked else InitError, match="^0$" if is_asked else "too few"):
        run(train)(new())
    assert done == ["function"] * is_asked
    leave._functions.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["elastic-000000000001.state"]
    begin_anew(monkeypatch)
    state = new()
    assert run(train)(state) == 2
    assert state.weights.tolist() == [11, 11, 11]  # the batch of the commit is done again, as after any loss
    assert not list(tmp_path.iterdir()), "the job has ended well, so the next one begins anew"


def test_the_state_of_a_later_training_is_not_taken_for_that_of_the_first(
    job: Job, tmp_path: Path, settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    @run
    def train(state: ObjectState) -> tuple[int, int]:
        begun, state.batch = state.batch, state.batch + state.rate
        state.commit()
        if job.answers:
            raise PeerLostError("x")
        return begun, state.batch

    def new(rate: int) -> ObjectState:
        return ObjectState(lambda value: value, lambda: 0, batch=0, rate=rate)

    assert train(new(1)) == (0, 1)
    job.answers = [None, InitError("too few ranks are left")]
    with pytest.raises(InitError, match="too few"):
        train(new(100))
    begin_anew(monkeypatch)
    assert [train(new(1)), train(new(100))] == [(0, 1), (100, 200)]


def test_a_process_that_was_never_a_member_leaves_no_state(
    job: Job, tmp_path: Path, settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        path.unlink()  # by the ranks, which have ended well
        raise InitError("the job has ended")

    monkeypatch.setattr(context, "renew", end)
    state = ObjectState(lambda value: value, lambda: 0, batch=0)
    path = checkpoint.write(str(tmp_path), 3, state.checkpoint())
    with pytest.raises(InitError, match="the job has ended"):
        run(lambda state: None)(state)
    assert state.progress == 3
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_hold_the_state_is_an_error_at_the_start(
    job: Job, tmp_path: Path, settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.checkpoint_dir = "/proc/state/of/job"
    with pytest.raises(InitError, match=r"HOROVOD_CHECKPOINT_DIR \(--checkpoint-dir\), or .*'/proc/state/of/job'"):
        run(lambda state: None)(ObjectState(lambda value: value, lambda: 0, batch=0))
    settings.checkpoint_dir = str(tmp_path)
    (tmp_path / "elastic-000000000001.state").mkdir()
    with pytest.raises(InitError, match=r"--checkpoint-dir\), or read from it: .*Is a directory: .*1\.state'; name an"):
        run(lambda state: None)(ObjectState(lambda value: value, lambda: 0, batch=0))
    if os.geteuid() == 0:  # only root can make a folder of another user
        os.chown(tmp_path, 1234, -1)
        with pytest.raises(InitError, match=r"--checkpoint-dir\), .* the folder belongs to another user \(uid 1234\)"):
            run(lambda state: None)(ObjectState(lambda value: value, lambda: 0, batch=0))


def test_a_state_that_cannot_be_removed_does_not_fail_a_training_that_is_done(
    job: Job,
    tmp_path: Path,
    settings: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(state: ObjectState) -> str:
        (tmp_path / "elastic-000000000000.state").mkdir()  # also root cannot unlink a folder
        return "done"

    assert run(train)(ObjectState(lambda value: value, lambda: 0, batch=0)) == "done"
    assert "0.state'; remove this state of an earlier job, or the next start goes on with it" in caplog.text


def test_a_full_disk_is_told_in_one_line_and_nothing_stays_there(
    job: Job,
    tmp_path: Path,
    settings: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def train(state: ObjectState) -> None:
        state.commit()
        monkeypatch.setattr(os, "fsync", is_full)
        job.answers = [InitError("too few ranks are left")]
        raise PeerLostError("x")

    with pytest.raises(InitError, match="too few"):
        run(train)(ObjectState(lambda value: value, lambda: 0, batch=0))
    lines = [record for record in caplog.records if record.levelname == "ERROR"]
    full = f"the state of step 1 cannot be written to {tmp_path}: [Errno 28] No space left on device"
    assert [(record.getMessage(), record.exc_info) for record in lines] == [(full, None)]
    assert not list(tmp_path.iterdir())
