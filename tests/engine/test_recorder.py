"""The flight recorder: what it keeps, when it writes, and what the doctor makes of it."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from commands import printed, run
from harness import LIMIT_S, Ranks, on_ranks, run_ranks
from heard import heard
from kernel import tells_how_processes_end
from launching import PATIENT

import horovod.numpy as hvd
from horovod import context
from horovod.core.requests import Kind, TensorSpec
from horovod.engine import times
from horovod.links.shm import peers
from horovod.observe.recorder import DEFAULT_FOLDER, Trigger
from horovod.timeline.doctor import examine
from horovod.timeline.dumps import read_folder


def _work_then_signal(folder: str, times: int) -> None:
    os.chdir(folder)
    for i in range(times):
        hvd.allreduce(np.ones(3, np.float32), name="w")
        hvd.synchronize(hvd.allgather_async(np.ones((2, 2)), name=f"g{i % 7}"))
    hvd.barrier()
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + LIMIT_S / 2
    while len(list(Path(DEFAULT_FOLDER).glob("rank-*.json"))) < hvd.size() and time.monotonic() < deadline:
        time.sleep(0.01)
    hvd.barrier()


@pytest.mark.slow
def test_a_signal_to_one_rank_makes_all_write(tmp_path: Path) -> None:
    outcomes = Ranks(2, _work_then_signal, (str(tmp_path), 20)).outcomes()
    assert all(outcome.error is None for outcome in outcomes), [outcome.text for outcome in outcomes]
    dumps, notes = read_folder(tmp_path / DEFAULT_FOLDER)
    assert notes == []
    assert [dump.rank for dump in dumps] == [0, 1]
    assert [dump.reason for dump in dumps] == ["SIGUSR1", "rank 0 asked for it"]
    for dump in dumps:
        assert len(dump.operations) == 41
        first, second = dump.operations[:2]
        call, other = first.request, second.request
        assert (call.kind, call.name, call.tensors) == (Kind.ALLREDUCE, "allreduce.w", (TensorSpec("float32", (3,)),))
        assert (other.kind, other.tensors[0].dtype, second.members) == (Kind.ALLGATHER, "float64", (0, 1))
        assert first.submitted_ns <= first.waited_ns or first.waited_ns == 0
        assert 0 < first.submitted_ns <= first.started_ns <= first.ended_ns <= second.submitted_ns
        assert call.site.startswith(__file__)
        assert any("horovod-engine" in name for name in dump.threads)
    pairs = zip(dumps[0].operations, dumps[1].operations, strict=False)
    assert all(
        a.sequence == b.sequence and a.request.name == b.request.name for a, b in pairs if a.sequence and b.sequence
    )


@on_ranks(1, returns=[times.CAPACITY])
def test_the_ring_forgets_the_oldest() -> int:
    for _ in range(times.CAPACITY + 100):
        hvd.allreduce(np.ones(1), name="w")
    return len(context.engine().ring)


def _one_leaves() -> None:
    peers._COLLECT_TRIES = 4000  # the parent collects when the machine lets it
    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() == 1:
        os._exit(3)
    hvd.allreduce(np.ones(3), name="after")


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [True, False])
def test_a_failure_is_written_down_if_a_folder_is_set(tmp_path: Path, is_set: bool) -> None:
    env = {"HOROVOD_FLIGHT_RECORDER_DIR": str(tmp_path / "a" / "b")} if is_set else {}
    Ranks(3, _one_leaves, env=env).outcomes()
    if not is_set:
        assert not Path(DEFAULT_FOLDER).exists()
        return
    lines, found = examine(tmp_path / "a" / "b")
    text = "\n".join(lines)
    assert found
    assert "There is no dump of rank 1" in text
    # How it ended is known where the kernel tells.
    assert ("exited with code 3 without hvd.shutdown()" if tells_how_processes_end() else "died") in text
    assert "allreduce 'after'" in text


RAISES = """
import numpy as np
import horovod.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(3), name="before")
if hvd.rank() == 1:
    raise ValueError("not a number")
hvd.allreduce(np.ones(3), name="after")
"""


@pytest.mark.slow
def test_the_rank_whose_script_fails_writes_too(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(RAISES)
    code, output = run(
        [*PATIENT, "-np", "2", "python", str(tmp_path / "s.py")],
        tmp_path,
        HOROVOD_FLIGHT_RECORDER_DIR=str(tmp_path / "dump"),
    )
    assert code == 1, output
    text = "\n".join(examine(tmp_path / "dump")[0])
    assert "dumps of ranks 0, 1" in text
    assert "* Rank 1 failed first:" in text
    assert "ValueError: not a number" in text and f'File "{tmp_path / "s.py"}", line 7' in text
    assert "(rank 0 failed afterwards.)" in text
    assert f"horovodrun: to see what each rank did last: horovodrun --doctor {tmp_path / 'dump'}" in output
    # An error that follows from another rank's end has a few lines, which end in the script.
    lines = printed(output, "[0]<stderr>:")
    assert lines[-4:-1] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "s.py"}", line 8, in <module>',
        '    hvd.allreduce(np.ones(3), name="after")',
    ]
    assert lines[-1].startswith("horovod.errors.PeerLostError: rank 1")


@pytest.mark.slow
def test_debugging_shows_tracebacks_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(RAISES)
    command = [*PATIENT, "-np", "2", "--log-level", "debug", "python", str(tmp_path / "s.py")]
    _, output = run(command, tmp_path)
    assert "PeerLostError: rank 1" in output
    assert f"{Path('horovod', 'engine', 'engine.py')}" in output


def _write_nowhere() -> list[str]:
    with heard() as messages:
        os.kill(os.getpid(), signal.SIGUSR1)
    hvd.allreduce(np.ones(1))
    assert context.engine().failure is None
    return messages


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [[message]] = run_ranks(1, _write_nowhere, env={"HOROVOD_FLIGHT_RECORDER_DIR": str(tmp_path / "file")})
    assert "could not write" in message


def test_signals_that_come_faster_than_dumps_are_written_do_not_pile_up() -> None:
    calls: list[int] = []

    def slow() -> None:
        calls.append(1)
        if len(calls) < 3:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(calls) == 1

    trigger = Trigger(slow)
    trigger.set()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [1]
        calls[:] = [1] * 3
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(calls) == 4
    finally:
        trigger.unset()


def test_the_signal_is_taken_only_where_nobody_else_wants_it() -> None:
    calls: list[int] = []
    mine = Trigger(lambda: calls.append(1))
    before = signal.signal(signal.SIGUSR1, lambda *_: calls.append(2))
    try:
        mine.set()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [2]
    finally:
        signal.signal(signal.SIGUSR1, before)
    faulthandler.register(signal.SIGUSR1)
    try:
        mine.set()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    elsewhere = threading.Thread(target=mine.set)
    elsewhere.start()
    elsewhere.join()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    mine.set()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == [2, 1]
    mine.unset()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
