"""Elastic jobs that end while their script runs, or while the kernel holds a killed rank."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from launching import horovodrun, started

import horovod
from horovod.core import membership
from horovod.errors import LaunchError
from horovod.launch.local import LocalJob

PY = sys.executable
HOST = os.uname().nodename
#: Lets the script take its time.
PATIENT = [
    PY,
    "-c",
    "import sys; from horovod.launch import cli, discovery; discovery.LIMIT_S = 1000; sys.exit(cli.main())",
]


def test_ctrl_c_does_not_wait_for_the_script(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "asked")
    flags = ("-np", "2", "--host-discovery-script", f"echo up > {tmp_path}/asked; exec sleep 1000")
    with started(*flags, PY, "-c", "1", ranks=0, program=PATIENT) as running:
        assert (tmp_path / "asked").read_text() == "up\n"
        running.process.send_signal(signal.SIGINT)
        ended = running.end()
    assert (ended.code, ended.err) == (130, "horovodrun: SIGINT received; nothing is left running\n")


def test_a_killed_rank_that_the_kernel_holds_until_the_end_is_a_loss(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> int:
        import time

        import horovod.numpy as hvd
        from horovod import context

        hvd.init()
        context.renew()
        if hvd.rank() == 1:
            time.sleep(1000)
        context.renew(1)
        return hvd.size()

    monkeypatch.setattr(LocalJob, "kill_rank", lambda job, rank: None)
    monkeypatch.setattr(membership, "_KILL_S", 0.1)
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "1")
    assert horovod.run(train, num_proc=2, min_num_proc=1, cooldown_range=(3600, 3600)) == [1]
    said = capfd.readouterr().err
    assert re.search(rf"rank 1 \(on {HOST}:1\) was killed by \w+: it did not come .*; 1 rank continues at step 1", said)
    assert re.search(r"1 loss and 0 joins by step 1, 1 reset, [1-9]\S* of ", said), said


@pytest.mark.parametrize("fails", [True, False], ids=["exception", "result"])
def test_an_elastic_horovod_run_that_fails_has_the_traceback_of_the_function(fails: bool) -> None:
    def train() -> object:
        if fails:
            raise KeyError("no such column")
        return (number for number in range(3))

    with pytest.raises(LaunchError) as caught:
        horovod.run(train, num_proc=2, min_num_proc=1)
    said = str(caught.value)
    assert re.search(
        r"^the job has ended: a new process .* ended with exit code 1, before the ranks had met$", said, re.M
    )
    if fails:
        assert re.search(
            r"\n\nTraceback .*\n.*test_elastic_ends.py\", line \d+, in train\n.*KeyError: 'no such", said, re.S
        )
        assert isinstance(caught.value.__cause__, KeyError)
    else:
        assert "\n\nthe function returned an object of type generator, which cannot be sent" in said


#: In slot 1 the first process is lost, the second one ends without a call of init(), and the third one trains.
COMES_AND_GOES = """
import os, signal, sys
from pathlib import Path
count = len(list(Path().glob("*.came")))
if os.environ["HOROVOD_SLOT"] == "1":
    Path(f"{count}.came").touch()
    if count == 1:
        sys.exit(0)
import numpy as np, horovod.numpy as hvd
hvd.init()
state = hvd.elastic.NumpyState(left=3)

@hvd.elastic.step
def one(state):
    if os.environ["HOROVOD_SLOT"] == "1" and count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    state.left -= int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="ones")[0]) == 2

@hvd.elastic.run
def train(state):
    while state.left:
        one(state)

train(state)
"""


def test_a_new_process_that_ends_without_init_was_no_rank_that_trains_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMES_AND_GOES)
    soon = ("--blacklist-cooldown-range", "0.1", "0.1")
    ended = horovodrun("-np", "2", "--min-np", "1", *soon, PY, str(script), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "ended with exit code 0, before it was a member" in ended.err
    assert "hvd.init()" not in ended.err
