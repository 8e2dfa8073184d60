"""poprun starts instances: labels, environment, failures, settings in files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from commands import run

from poprun.cli import main

pytestmark = pytest.mark.slow

POPRUN = [sys.executable, "-m", "poprun"]


def test_any_command_is_run_and_its_lines_are_labelled(tmp_path: Path) -> None:
    assert run([*POPRUN, "echo", "hi"], tmp_path) == (0, "[1,0]<stdout>:hi\n")


def test_instances_get_their_part_and_the_log_says_what_is_done(tmp_path: Path) -> None:
    program = "import popdist as p; print(p.getInstanceIndex(), p.getNumInstances(), p.getReplicaIndexOffset())"
    flags = ["--num-replicas=8", "--num-instances=4", "-vv", "--mpi-local-args=-x A=b", "--numa-aware=yes"]
    code, output = run([*POPRUN, *flags, sys.executable, "-c", program], tmp_path, OMP_NUM_THREADS="1")
    assert code == 0, output
    for i in range(4):
        assert f"[1,{i}]<stdout>:{i} 4 {2 * i}\n" in output
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} \d+ POPRUN \[I\] Running command: '", output, re.MULTILINE)
    assert re.search(r"POPRUN \[D\] \|\s+poprun topology", output)
    assert "POPRUN [D] instance 3 on " in output


def test_an_instance_that_fails_is_shown_although_it_was_hidden(tmp_path: Path) -> None:
    script = "echo said by $POPDIST_REPLICA_INDEX_OFFSET; [ $POPDIST_REPLICA_INDEX_OFFSET = 0 ] || exit 3"
    flags = ["--num-replicas=2", "--num-instances=2", "--only-output-from-instance=0", "--vipu-partition=p"]
    code, output = run([*POPRUN, *flags, "bash", "-c", script], tmp_path, OMP_NUM_THREADS="1")
    assert code == 3
    assert "[1,0]<stdout>:said by 0\n" in output and "[1,1]" not in output
    assert re.search(r"POPRUN \[E\] instance 1 on \S+ \(pid \d+\) failed with exit code 3\n", output)
    assert "POPRUN [E] the last lines of instance 1's output:\n" in output
    assert re.search(r"POPRUN \[E\]     said by 1\n", output)
    assert "POPRUN [W] without effect: --vipu-partition (no V-IPU here)\n" in output


def test_settings_are_written_read_and_shown_without_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    assert main(["--num-replicas=2", f"--export-config={path}", "--print-topology"]) == 0
    assert json.loads(path.read_text()) == {"num-replicas": 2, "print-topology": True}
    assert "poprun topology" in capsys.readouterr().out
    flags = [f"--import-config={path}", "--print-topology=no", "--num-instances=2", "--dry-run"]
    assert main([*flags, "echo", "a b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("localhost: POPDIST_NUM_TOTAL_REPLICAS=2 ")
    assert lines[1].endswith("POPDIST_LOCAL_INSTANCE_INDEX=1 echo 'a b'")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no program is given"),
        (["--num-replicas=3", "--num-instances=2", "x"], "take 2 or 4 replicas"),
        (["--only-output-from-instance=1", "x"], "there are instances 0 to 0"),
        (["-H", "localhost,127.0.0.1", "--num-replicas=2", "x"], "localhost and 127.0.0.1 are one machine"),
        (["--host=a", "--hostfile=b", "x"], "give --host or --hostfile, not both"),
        (["--hostfile=/nowhere", "x"], "--hostfile /nowhere: No such file"),
        (["no-such-program"], "the command 'no-such-program' was not found"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_more_instances_than_cores_and_arguments_that_mean_nothing_are_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--num-replicas=5000", "--num-instances=5000", "--mpi-global-args=--mca pml ob1 -x NO_SUCH_VARIABLE"]
    assert main([*flags, "--dry-run=yes", "true"]) == 0
    said = capsys.readouterr().err
    assert "5000 instances on each host share " in said
    assert "these have no effect: --mca pml ob1, -x NO_SUCH_VARIABLE (it is not set)" in said


@pytest.mark.parametrize(
    ("flags", "line"),
    [(["--version"], "poprun "), (["--version", "--version-format=full-text"], "python "), (["-h"], "usage: poprun ")],
)
def test_it_says_what_it_is(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 0
    assert any(said.startswith(line) for said in capsys.readouterr().out.splitlines())
