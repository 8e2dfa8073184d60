"""Signals to horovodrun for the ranks, such as SIGUSR1, which makes them write their flight recorders."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from launching import horovodrun, started

from horovod.launch.signals import ToldToEnd, told_to_end
from horovod.timeline.dumps import read_folder

PY = sys.executable
# Each rank waits, in Python, for a file; rank 1 in an operation, for rank 0: it is up when it waits there.
SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
import horovod.numpy as hvd
from horovod import context

def up():
    print("up", os.getpid(), flush=True)

def up_when_waiting():
    while threading.main_thread().ident not in context.engine().waits():
        time.sleep(0.01)
    up()

if "init" in sys.argv:
    hvd.init()
if "init" in sys.argv and hvd.rank() == 1:
    threading.Thread(target=up_when_waiting).start()
    hvd.allreduce(np.ones(1), name="late")
else:
    up()
while not Path("go").exists():
    time.sleep(0.01)
if "init" in sys.argv and hvd.rank() != 1:
    hvd.allreduce(np.ones(1), name="late")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOROVOD_FLIGHT_RECORDER_DIR", raising=False)


@pytest.mark.parametrize("command", [[PY, "s.py", "init"], ["sh", "-c", f"{PY} s.py init; exit $?"]], ids=["py", "sh"])
def test_all_ranks_write_their_flight_recorders(command: list[str]) -> None:
    with started("-np", "3", *command, ranks=3) as running:
        running.process.send_signal(signal.SIGUSR1)
        folder = Path("horovod-flight-recorder")
        while len(list(folder.glob("rank-*.json"))) < 3:
            assert running.process.poll() is None
        # Now, while rank 1 waits: a rank that was asked late writes again.
        dumps, notes = read_folder(folder)
        Path("go").touch()
        ended = running.end()
    assert ended.code == 0, ended.err
    assert [dump.rank for dump in dumps] == [0, 1, 2] and not notes
    assert any(dump.reason == "SIGUSR1" for dump in dumps)
    assert dumps[1].wait is not None and dumps[1].wait.request.name == "allreduce.late"
    assert f"horovodrun --doctor {folder}" in ended.err


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_ranks_that_do_not_listen_are_left_alone(name: str) -> None:
    """Before ``init`` SIGUSR1 would kill them."""
    with started("-np", "2", PY, "s.py", ranks=2) as running:
        running.process.send_signal(signal.Signals[name])
        said = running.process.stderr.readline()
        Path("go").touch()
        ended = running.end()
    assert said.startswith(f"horovodrun: {name} was not passed on: no rank handles it")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_handler_of_the_script_gets_the_signal(name: str) -> None:
    """Schedulers send either of them before they end a job: ``#SBATCH --signal=B:USR2@120``, ``qsub -notify``."""
    # The signal may come before the pause.
    code = (
        f"import os, signal, sys; signal.signal(signal.{name}, lambda *_: sys.exit(print('mine', flush=True)));"
        "print('up', os.getpid(), flush=True); signal.pause()"
    )
    with started("-np", "2", PY, "-c", code, ranks=2) as running:
        running.process.send_signal(signal.Signals[name])
        ended = running.end()
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[0]<stdout>:mine", "[1]<stdout>:mine"]


def test_the_keeper_survives_a_signal_to_everybody() -> None:
    """As a batch system sends it."""
    with started("-np", "2", PY, "s.py", "init", ranks=2) as running:
        keepers = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        for pid in (*map(int, keepers), *running.pidfds.values()):
            os.kill(pid, signal.SIGUSR1)
        Path("go").touch()
        ended = running.end()
    assert keepers
    assert ended.code == 0, ended.err


# As a callback that is called while a module is loaded, or an extension that clears errors.
LOADS = """
import os, signal, sys

class Swallows:
    def find_spec(self, name, *_):
        try:
            name == "msgspec" and os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            pass

sys.meta_path.insert(0, Swallows())
from horovod.launch.cli import main
sys.exit(main(["-np", "1", "true"]))
"""


def test_a_signal_is_not_lost_while_modules_are_loaded() -> None:
    ended = horovodrun(program=[PY, "-c", LOADS])
    assert (ended.code, ended.err) == (130, "horovodrun: SIGINT received; no rank was started\n")


def test_a_signal_is_not_lost_in_code_that_catches_everything() -> None:
    reached = []
    with pytest.raises(ToldToEnd), told_to_end():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
        reached.append("the end")
    assert reached
