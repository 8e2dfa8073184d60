"""The file in which an elastic job leaves its state."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from elastic_double import Arrays

from horovod.bindings.elastic import checkpoint
from horovod.bindings.elastic.state import ObjectState


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
