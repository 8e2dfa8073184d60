"""Parts of elastic jobs that decide without a process: the script's answers, the user's options, the report."""

from __future__ import annotations

from typing import Any

import pytest

from horovod.core.membership_events import Assign, Position, Slot
from horovod.launch.discovery import Answers, ScriptAnswer, read_answer
from horovod.launch.elastic_members import ElasticMembers, Ledger, Loss, signature
from horovod.launch.elastic_options import elastic_options, seconds
from horovod.launch.hosts import HostSlots

A, B = HostSlots("a", 2), HostSlots("me@b", 3)


@pytest.mark.parametrize(
    ("status", "out", "error", "hosts", "problem"),
    [
        (0, "a\nme@b:3 # new\n\n", "noise", {"a": A, "b": B}, ""),
        (0, "a slots=2\nb\n", "", {"a": A, "b": HostSlots("b", 2)}, ""),
        (0, "localhost:1\nhere:2\n", "", {"me": HostSlots("localhost", 3)}, ""),
        (0, "a:2\nb:0\nlocalhost slots=0\n", "", {"a": A}, ""),
        (0, "# up\r\n  a:1 \t\r\na:1\r\n", "", {"a": A}, ""),
        (
            0,
            "a : 2\n",
            "",
            {},
            "printed no list of hosts: its output, line 1: expected `host slots=n`, received 'a : 2'",
        ),
        (0, "a:0\n", "", {}, "printed no host"),
        (0, "fd77::0\n[fd77::1]:0\na:0  # soon\n", "", {"fd77::0": HostSlots("fd77::0", 2)}, ""),
        (0, " \n", "no hosts\n", {}, "printed no host: no hosts"),
        (0, "<html>\n", "", {}, "printed no list of hosts: '<html>' is not a name of a host"),
        (0, "a b c\n", "", {}, "printed no list of hosts: its output, line 1: expected `host slots=n`"),
        (3, "a:2\n", "Traceback\nboom\n", {}, "ended with exit code 3: boom"),
        (-9, "a:2\n", "", {}, "was killed by SIGKILL"),
        (None, "a:2\n", "", {}, "did not end within 10 s"),
        (0, ("a:2\n" * (1 << 20))[: 1 << 20], "", {}, "printed 1048576 bytes or more"),
    ],
)
def test_answers_of_a_script(
    status: int | None, out: str, error: str, hosts: dict[str, HostSlots], problem: str
) -> None:
    answer = read_answer(status, out, error, 2, lambda name: name in ("localhost", "here"), "me")
    assert answer.hosts == hosts
    assert answer.problem.startswith(problem) if problem else not answer.problem


def test_a_script_that_fails_is_reported_once_and_its_last_hosts_stay() -> None:
    good, other = ScriptAnswer({"a": A}), ScriptAnswer({"a": A, "b": B})
    bad, worse = ScriptAnswer({}, "printed no host"), ScriptAnswer({}, "ended with exit code 3: at 12:00")
    again = ScriptAnswer({}, "ended with exit code 3: at 12:01")
    answers, lines = Answers(), []
    for answer in (good, bad, bad, worse, again, bad, other, again, good, *[bad] * 60, other):
        hosts = answers.hosts
        lines.append(answers.add(answer))
        assert answers.hosts == (answer.hosts or hosts)
    assert [line for line in lines if line] == [
        "the script for hosts printed no host; keeping the last 1 host",
        "the script for hosts ended with exit code 3: at 12:00; keeping the last 1 host",
        "the script for hosts works again",
        "the script for hosts printed no host; keeping the last 1 host",
        "the script for hosts works again",
    ]
    assert [number for number, line in enumerate(lines) if line] == [1, 3, 6, 68, 69]


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
    policy = options.policy(9.0, 5.0)
    assert (policy.size, policy.minimum, policy.most) == sizes
    assert (policy.timeout_s, policy.start_timeout_s) == (9.0, 5.0)
    assert policy.is_discovering == ("--host-discovery-script" in given)


@pytest.mark.parametrize(("most", "sizes"), [(None, (3, 1, 3)), ("2", (2, 1, 2)), ("9", (3, 1, 9))])
def test_an_elastic_job_starts_on_all_slots_of_an_allocation(most: str | None, sizes: tuple[int, int, int]) -> None:
    assert elastic_options({"--min-np": "4"}, None, 3) == elastic_options({"--min-np": "4"}, None)  # spread over them
    options = elastic_options({"--min-np": "1", "--max-np": most}, None, 3)
    assert (options.num_proc, options.minimum, options.maximum) == sizes


@pytest.mark.parametrize("given", ["600", True, -1, float("inf"), float("nan")])
def test_a_time_limit_that_is_no_number_of_seconds_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="elastic_timeout must be a number of seconds, at least 0"):
        seconds(given, "elastic_timeout")
    assert seconds(5, "elastic_timeout") == 5


def test_other_options_of_an_elastic_job() -> None:
    given = {
        "--min-np": 1,
        "--spares": "1",
        "--chaos": "1.5m",
        "--reset-limit": 0,
        "--blacklist-cooldown-range": (2, 9),
    }
    options = elastic_options(given, 2)
    policy = options.policy(9.0, 5.0)
    assert (options.chaos_s, policy.spares, policy.resets, policy.cool_down_s) == (90.0, 1, 0, (2.0, 9.0))
    assert elastic_options({"--min-np": None, "--host-discovery-script": None}, 2) is None


@pytest.mark.parametrize("flag", ["--min-np", "--host-discovery-script", "--chaos"])
def test_an_empty_option_does_not_make_the_job_one_of_fixed_size(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} is empty; leave it out, or give a value"):
        elastic_options({flag: ""}, 2)


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
    assert ledger.begin(201.0, 4, 1, [], 200) != []
    ledger.changing(221.0)
    assert ledger.summary(301.0, 200).endswith("140.50 of 300.0 s lost, goodput 53.2%"), "a member never came"


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


@pytest.mark.parametrize(
    ("kept", "steps", "code", "is_vain"),
    [
        (0, [7] * 5, 137, True),
        (0, [7] * 4, 137, False),
        (0, [7] * 4, 3, True),  # the first one ended by itself, too
        (0, [7] * 3, 3, False),
        (0, [7, 7, 7, 8, 8], 137, False),  # a step was completed in between
        (0, [7, 7, 7, 8, 8], 3, False),
        (3, [7] * 6, 137, False),  # a rank that was there from the beginning was lost in between
        (3, [7] * 8, 137, True),
        (3, [7] * 4, 3, True),
    ],
)
def test_processes_that_are_always_lost_before_another_step_end_the_job(
    kept: int, steps: list[int], code: int, is_vain: bool
) -> None:
    """The losses at these steps are those of process 1 and its replacements, but one is of process 0."""
    members = ElasticMembers()
    for number in range(2):
        members.start(Slot("a", number), 2)
    for generation, step in enumerate([0, *steps], 1):
        positions = dict.fromkeys(sorted(members.running), Position(0, 0, 1, 0, 1, False))
        members.assigned(0.0, Assign(generation, positions))
        members.begun(1.0, generation, step, str)
        slot = Slot("a", int(generation != kept))
        members.lost(2.0, members.running.pop(slot), "rank 1 of a:1", "was lost", code, "")
        members.start(slot, 2)
    said = "rank 1 of a:1 was lost, as others before it, and no step was completed since step 7"
    assert members.script_error() == (said if is_vain else "")


def test_a_member_that_ends_before_its_launcher_knows_of_the_assignment_is_lost_by_its_rank() -> None:
    members = ElasticMembers()
    for number in range(2):
        members.start(Slot("a", number), 2)
    positions = dict.fromkeys(members.running, Position(0, 0, 1, 0, 1, False))
    ended = members.running.pop(Slot("a", 1))
    members.assigned(0.0, Assign(1, positions))
    assert members.begun(1.0, 1, 0, str) == []
    assert members.ranks == {0: 0, ended: 1}
    assert members.name(ended) == "rank 1" and members.was_member(ended)
    assert members.lost(2.0, ended, "rank 1", "ended with exit code 7", 7, "") == []
    assert members.ledger.causes() == ["    rank 1 ended with exit code 7"]


def test_a_loss_after_the_training_is_told_at_once_and_takes_no_time() -> None:
    members = ElasticMembers()
    for number in range(2):
        members.start(Slot("a", number), 2)
    members.assigned(0.0, Assign(1, dict.fromkeys(members.running, Position(0, 0, 1, 0, 1, False))))
    members.begun(1.0, 1, 0, str)
    members.ledger.is_trained = True
    how = "was killed by SIGKILL"
    assert members.lost(2.0, 1, "rank 1", how, 137, "") == [f"rank 1 {how}, after the training had ended"]
    assert members.ledger.due_at() is None
    assert members.ledger.causes() == [f"    rank 1 {how}"]
    assert "1 loss and 0 joins by step 9, 0 resets, 0.00 of 60.0 s lost" in members.ledger.summary(61.0, 9)
    members.begun(62.0, 2, 9, str)
    assert not members.ledger.is_trained


def test_exit_code_0_is_told_only_if_the_others_go_on() -> None:
    members = ElasticMembers()
    for number in range(2):
        members.start(Slot("a", number), 2)
    assert members.left(2, "a process that was never a member") == []
    members.assigned(0.0, Assign(1, dict.fromkeys(members.running, Position(0, 0, 1, 0, 1, False))))
    assert members.begun(1.0, 1, 0, str) == []
    assert members.left(members.running.pop(Slot("a", 1)), "rank 1") == []
    assert members.ledger.summary(60.0, 9) == ""
    members.assigned(2.0, Assign(2, dict.fromkeys(members.running, Position(0, 0, 1, 0, 1, False))))
    lines = members.begun(2.5, 2, 9, str)
    assert lines == ["rank 1 left with exit code 0; 1 rank continues at step 9, after 0.50 s"]
    assert members.ledger.summary(60.0, 9).startswith("1 loss and 0 joins")


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
