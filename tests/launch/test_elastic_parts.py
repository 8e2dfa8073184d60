"""Parts of elastic jobs that decide without a process: the script's answers, the user's options, the report."""

from __future__ import annotations

from typing import Any

import pytest

from horovod.launch.discovery import HostOffer, ScriptAnswer, judge, read_answer
from horovod.launch.elastic_options import elastic_options
from horovod.launch.ledger import Ledger, Loss, signature

A, B = HostOffer("a", 2), HostOffer("me@b", 3)


@pytest.mark.parametrize(
    ("status", "out", "error", "hosts", "problem"),
    [
        (0, "a\nme@b:3 # new\n\n", "noise", {"a": A, "b": B}, ""),
        (0, "a slots=2\nb\n", "", {"a": A, "b": HostOffer("b", 2)}, ""),
        (0, "localhost:1\nhere:2\n", "", {"me": HostOffer("localhost", 3)}, ""),
        (0, "a:2\nb:0\nlocalhost slots=0\n", "", {"a": A}, ""),
        (0, "a:0\n", "", {}, "printed no host"),
        (0, " \n", "no hosts\n", {}, "printed no host: no hosts"),
        (0, "<html>\n", "", {}, "printed no list of hosts: '<html>' is no name of a host"),
        (0, "a b c\n", "", {}, "printed no list of hosts: its output, line 1: expected `host slots=n`"),
        (3, "a:2\n", "Traceback\nboom\n", {}, "ended with exit code 3: boom"),
        (-9, "a:2\n", "", {}, "was killed by SIGKILL"),
        (None, "a:2\n", "", {}, "did not end within 10 s"),
    ],
)
def test_answers_of_a_script(
    status: int | None, out: str, error: str, hosts: dict[str, HostOffer], problem: str
) -> None:
    answer = read_answer(status, out, error, 2, lambda name: name in ("localhost", "here"), "me")
    assert answer.hosts == hosts
    assert answer.problem.startswith(problem) if problem else not answer.problem


def test_a_script_that_fails_is_reported_once_and_its_last_hosts_stay() -> None:
    good, other = ScriptAnswer({"a": A}), ScriptAnswer({"a": A, "b": B})
    bad, worse = ScriptAnswer({}, "printed no host"), ScriptAnswer({}, "did not end within 10 s")
    last, lines = good, []
    for answer in (good, bad, bad, worse, bad, other):
        last, line = judge(answer, last)
        lines.append(line)
        assert last.hosts == (other.hosts if answer is other else good.hosts)
    assert lines == [
        "",
        "the script for hosts printed no host; keeping the last 1 host",
        "",
        "the script for hosts did not end within 10 s; keeping the last 1 host",
        "the script for hosts printed no host; keeping the last 1 host",
        "the script for hosts works again",
    ]


@pytest.mark.parametrize(
    ("given", "num_proc", "sizes"),
    [
        ({"--min-np": "2"}, None, (2, 2, 2)),
        ({"--min-np": 2}, 4, (4, 2, 4)),
        ({"--max-np": "8"}, 4, (4, 4, 8)),
        ({"--min-np": "1", "--max-np": "3"}, 2, (2, 1, 3)),
        ({"--host-discovery-script": "s"}, 2, (2, 2, 1 << 20)),
    ],
)
def test_sizes_of_an_elastic_job(given: dict[str, Any], num_proc: int | None, sizes: tuple[int, int, int]) -> None:
    options = elastic_options(given, num_proc)
    assert options is not None
    policy = options.policy(9.0, 5.0)
    assert (policy.size, policy.fewest, policy.most) == sizes
    assert (policy.timeout_s, policy.start_timeout_s) == (9.0, 5.0)
    assert policy.is_discovering == ("--host-discovery-script" in given)


def test_other_options_of_an_elastic_job() -> None:
    given = {
        "--min-np": 1,
        "--spares": "1",
        "--chaos": "1.5m",
        "--reset-limit": 0,
        "--blacklist-cooldown-range": (2, 9),
    }
    options = elastic_options(given, 2)
    assert options is not None
    policy = options.policy(9.0, 5.0)
    assert (options.chaos_s, policy.spares, policy.resets, policy.cool_down_s) == (90.0, 1, 0, (2.0, 9.0))
    assert elastic_options({"--min-np": None, "--host-discovery-script": ""}, 2) is None


def test_losses_and_joins_are_told_with_their_times() -> None:
    ledger = Ledger()
    ledger.changing(0.0)
    assert ledger.begin(1.0, 1, 3, [], 0) == []
    killed = Loss("rank 1 (pid 7 on a:1)", "was killed by SIGKILL", 1, 137)
    ledger.ended(11.0, "rank 1 (pid 7 on a:1) was killed by SIGKILL", killed)
    assert ledger.due_at() == 16.0
    assert ledger.waiting(15.9, 3) == ""
    assert ledger.waiting(16.0, 3) == ("rank 1 (pid 7 on a:1) was killed by SIGKILL; waiting until 3 or more can go on")
    assert ledger.waiting(17.0, 3) == ""
    assert ledger.begin(21.0, 2, 3, ["rank 2 on b:0"], 40) == [
        "rank 1 (pid 7 on a:1) was killed by SIGKILL; 3 ranks continue at step 40, after 10.00 s",
        "rank 2 on b:0 joined; 3 ranks continue at step 40, after 10.00 s",
    ]
    ledger.ended(31.0, "rank 0 (pid 6 on a:0) left", None)
    assert ledger.begin(31.5, 3, 1, [], 60) == ["rank 0 (pid 6 on a:0) left; 1 rank continues at step 60, after 0.50 s"]
    assert ledger.summary(101.0, 200) == (
        "1 loss and 1 join by step 200, 2 resets, 10.50 of 100.0 s lost, goodput 89.5%"
    )
    assert ledger.causes() == ["    rank 1 (pid 7 on a:1) was killed by SIGKILL"]
    ledger.ended(151.0, "rank 0 (pid 6 on a:0) was lost", None)
    assert ledger.summary(201.0, 200).endswith("60.50 of 200.0 s lost, goodput 69.8%"), "nobody came in its place"


def test_an_undisturbed_job_has_no_summary() -> None:
    ledger = Ledger()
    ledger.begin(1.0, 1, 3, [], 0)
    assert ledger.summary(101.0, 200) == ""


@pytest.mark.parametrize(
    ("first", "second", "is_own"),
    [
        (("x", 1, 5), ("x", 2, 5), True),
        (("x", 1, 5), ("x", 2, 6), False),  # steps were completed in between
        (("x", 1, 5), ("y", 2, 5), False),  # another place
        (("x", 1, 5), ("x", 1, 5), False),  # at the same time: others may be left
        (("", 1, 5), ("", 2, 5), False),  # os._exit says nothing about the script
    ],
)
def test_an_error_that_repeats_without_progress_is_the_scripts_own(
    first: tuple[str, int, int], second: tuple[str, int, int], is_own: bool
) -> None:
    ledger = Ledger()
    for error, generation, progress in (first, second):
        ledger.ended(0.0, "gone", Loss("rank 1", "ended with exit code 1", generation, 1, error))
        ledger.begin(1.0, generation + 1, 2, [], progress)
    assert (ledger.own_error() is not None) == is_own


TRACEBACK = """noise
Traceback (most recent call last):
  File "/x/train.py", line 9, in <module>
    train(7)
  File "/x/train.py", line 4, in train
    raise ValueError("batch 7")
ValueError: batch 7
"""


def test_the_same_exception_has_the_same_signature_whatever_its_message() -> None:
    found = signature(TRACEBACK.splitlines())
    assert found == signature(TRACEBACK.replace("batch 7", "batch 8").splitlines())
    assert found != signature(TRACEBACK.replace("line 4", "line 5").splitlines())
    assert found.splitlines()[-1] == "ValueError"
    assert signature(["Killed"]) == ""
