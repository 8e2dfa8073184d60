"""Elastic jobs that end while their script runs, or while the kernel holds a killed rank."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from launching import started

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
