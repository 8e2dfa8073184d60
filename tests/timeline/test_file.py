"""The trace file is JSON at every moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod.timeline import file
from horovod.timeline.file import MOST_BYTES, TraceFile


def event(number: int, length: int = 100) -> bytes:
    """An event of ``length`` bytes."""
    bare = json.dumps({"n": number, "pad": ""}).encode()
    return json.dumps({"n": number, "pad": "x" * (length - len(bare))}).encode()


def numbers(path: Path) -> list[int]:
    return [entry["n"] for entry in json.loads(path.read_bytes())]


def test_events_come_in_order_and_the_blanks_go(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    trace = TraceFile(path, event(0))
    assert numbers(path) == [0]
    trace.append([event(1), event(2)])
    trace.append([])
    trace.append([event(3)])
    assert numbers(path) == [0, 1, 2, 3]
    trace.finish()
    assert numbers(path) == [0, 1, 2, 3]
    assert b"  " not in path.read_bytes()
    trace.finish()


@pytest.mark.parametrize("seed", range(3))
def test_any_lengths_and_batches(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    trace = TraceFile(tmp_path / "t", event(0))
    lengths = [chance.choice([30, 100, 700, 4000, MOST_BYTES]) for _ in range(900)]
    events = [event(i + 1, length) for i, length in enumerate(lengths)]
    while events:
        count = chance.randrange(1, 50)
        trace.append(events[:count])
        del events[:count]
    assert numbers(tmp_path / "t") == list(range(901))
    trace.finish()
    assert numbers(tmp_path / "t") == list(range(901))


def test_events_that_fill_a_page_exactly(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t", event(0))
    for i in range(200):
        trace.append([event(i + 1, MOST_BYTES)])
    assert numbers(tmp_path / "t") == list(range(201))
    trace.finish()
    assert numbers(tmp_path / "t") == list(range(201))


def test_an_event_that_fits_on_no_page_is_left_out(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t", event(0))
    trace.append([event(1), event(2, MOST_BYTES + 1), event(3)])
    assert numbers(tmp_path / "t") == [0, 1, 3]
    trace.finish()


def test_every_system_call_leaves_complete_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill may come between any two calls; and a write within one page is done as a whole."""
    path = tmp_path / "t"
    monkeypatch.setattr(file, "_FIRST_BYTES", 3 * 4096)
    checked = 0

    def checking(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal checked
            result = original(*args, **kwargs)
            if path.exists():
                checked += 1
                json.loads(path.read_bytes())
                if name == "pwrite" and os.fstat(args[0]).st_ino == path.stat().st_ino:
                    assert args[2] // 4096 == (args[2] + len(args[1]) - 1) // 4096, "a write across pages may be cut"
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "rename", "link", "ftruncate", "open", "close", "unlink"):
        checking(name)
    trace = TraceFile(path, event(0))
    for i in range(1, 400):
        trace.append([event(i)])
    trace.finish()
    assert checked > 400
    assert numbers(path) == list(range(400))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_an_existing_file_is_replaced_and_a_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("something else")
    TraceFile(path, event(0)).finish()
    assert numbers(path) == [0]
    with pytest.raises(OSError, match="no regular file"):
        TraceFile(tmp_path, event(0))


def test_a_very_long_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_CUT_BYTES", 1000)
    trace = TraceFile(tmp_path / "t", event(0))
    trace.append([event(i) for i in range(1, 30)])
    trace.finish()
    assert numbers(tmp_path / "t") == list(range(30))
    assert (tmp_path / "t").read_bytes().endswith(b"}\n]")


@pytest.mark.parametrize("most", [4 * 4096, 1 << 20], ids=["very long", "short"])
@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "killed"])
def test_a_recording_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_finished: bool, most: int) -> None:
    """A very long one is neither read as a whole nor copied: a reset of an elastic job would wait for that."""
    path = tmp_path / "t"
    monkeypatch.setattr(file, "_CUT_BYTES", most)
    monkeypatch.setattr(file, "_FIRST_BYTES", 3 * 4096)
    trace = TraceFile(path, event(0), goes_on=True)
    for session in range(4):
        trace.append([event(1 + 200 * session + i) for i in range(200)])
        inode = path.stat().st_ino
        if is_finished:
            trace.finish()
        else:
            os.close(trace._fd)
        trace = TraceFile(path, event(-1), goes_on=True)
        assert trace.before.startswith(b"[\n" + event(0)) and len(trace.before) <= 4096
        assert (path.stat().st_ino == inode) or (is_finished and most == 1 << 20)
        assert numbers(path) == list(range(201 + 200 * session))
    trace.finish()
    assert numbers(path) == list(range(801))


WRITER = """
import sys
from pathlib import Path
from horovod.timeline.file import TraceFile
trace = TraceFile(Path(sys.argv[1]), b'{"n":0}')
print("up", flush=True)
i = 0
while True:
    trace.append([b'{"n":%d,"pad":"%s"}' % (i + k + 1, b"x" * ((i + k) * 37 % 900)) for k in range(7)])
    i += 7
"""


@pytest.mark.slow
def test_killed_in_the_middle(tmp_path: Path) -> None:
    for attempt in range(8):
        path = tmp_path / f"{attempt}"
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        process.stdout.readline()
        while path.stat().st_size < (200 + 300 * attempt) << 10:
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = numbers(path)
        assert found == list(range(len(found)))
