"""An elastic job with --checkpoint-dir that is told to end: its ranks may complete a step and write the state."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

from launching import HOROVODRUN, horovodrun, started

#: In the fourth step of the first job, the ranks wait for SIGTERM, and get it again, as when Slurm signals horovodrun
#: and all ranks; then they need a worker, as a DataLoader's. The argument is the number of steps: the first job has no
#: end, since the job service may answer after any number of them.
TRAIN = """
import multiprocessing, os, signal, sys, time
import numpy as np
import horovod.numpy as hvd
from horovod.bindings.elastic import leave

def give(pipe):
    while True:
        pipe.send(pipe.recv())

ours, theirs = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=give, args=(theirs,), daemon=True).start()
theirs.close()
hvd.init()
state = hvd.elastic.NumpyState(w=np.zeros(1), batch=0)

@hvd.elastic.step
def one(state):
    if state.batch == 3:
        print("up", os.getpid(), flush=True)
        while not leave.was_asked():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    ours.send(np.ones(1))
    state.w += hvd.allreduce(ours.recv(), name="one")
    state.batch += 1

@hvd.elastic.run
def train(state):
    first = state.batch
    while state.batch - first < float(sys.argv[1]):
        one(state)
    print("done", first, state.batch, state.w[0], flush=True)

train(state)
"""
#: Kills without more grace at once, so that there is no time to write anything.
NO_GRACE = [
    sys.executable,
    "-c",
    "import sys; from horovod.launch import cli, local; local.GRACE_S = 0.0; sys.exit(cli.main())",
]


def test_a_step_is_completed_and_the_state_written_when_the_job_is_told_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    flags = ("-np", "2", "--min-np", "1", "--checkpoint-dir", str(folder), sys.executable, "-c", TRAIN)
    with started(*flags, "inf", ranks=2, program=NO_GRACE) as running:
        running.process.send_signal(signal.SIGTERM)
        ended = running.end()
    assert ended.code == 143, ended.err
    assert "horovodrun: the ranks may take 600 s to complete their step and write their state" in ended.err
    assert "Traceback" not in ended.err
    assert [path.suffix for path in folder.iterdir()] == [".state"]
    again = horovodrun(*flags, "5")
    ends = [tuple(map(float, words.split())) for words in re.findall(r"done (.*)", again.out)]
    first = ends[0][0]
    assert first >= 4, again.out
    assert ends == [(first, first + 5, first + 5)] * 2, again.err
    assert not any(folder.iterdir())


def test_the_second_signal_ends_a_rank_that_does_not_complete_its_step(tmp_path: Path) -> None:
    stuck = TRAIN.replace("not leave.was_asked()", "True")
    flags = ("-np", "2", "--min-np", "1", "--checkpoint-dir", str(tmp_path), sys.executable, "-c", stuck, "inf")
    with started(*flags, ranks=2, program=NO_GRACE) as running:
        running.process.send_signal(signal.SIGTERM)
        assert "the ranks may take 600 s" in running.process.stderr.readline()
        running.process.send_signal(signal.SIGTERM)
        assert running.still_alive() == []
        assert running.end().code == 143
    assert not any(tmp_path.iterdir())


def test_a_folder_of_another_job_on_this_machine_is_refused(tmp_path: Path) -> None:
    flags = ("-np", "1", "--min-np", "1", "--checkpoint-dir")
    ended = horovodrun(*flags, str(tmp_path / "state"), *HOROVODRUN, *flags, "state", "true", cwd=tmp_path)
    assert ended.code == 1
    assert "error: another job uses HOROVOD_CHECKPOINT_DIR (--checkpoint-dir) state, and each would" in ended.err
    assert horovodrun(*flags, "state", "true", cwd=tmp_path).code == 0, "the other job has ended"
