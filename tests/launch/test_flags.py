"""The command line and the YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod.config import SETTINGS, load
from horovod.launch.flags import Options, UsageError, parse_flags, parse_yaml


def parse(*argv: str) -> Options:
    return parse_flags(argv, "v")


@pytest.mark.parametrize("flags", [("-np", "2"), ("--num-proc", "2"), ("--num-proc=2",), ("-np=2",)], ids=" ".join)
def test_number_of_processes(flags: tuple[str, ...]) -> None:
    assert parse(*flags, "python") == Options(num_proc=2, command=("python",))


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (("-np", "2", "python", "train.py", "-np", "3", "--verbose", "--foo"), "python train.py -np 3 --verbose --foo"),
        (("-np", "2", "--", "-odd", "x"), "-odd x"),
        (("--gloo", "python", "-v"), "python -v"),
        (("python", "--", "x"), "python -- x"),
    ],
    ids=str,
)
def test_command_is_everything_from_the_first_word_that_is_no_flag(argv: tuple[str, ...], command: str) -> None:
    assert " ".join(parse(*argv).command) == command


def test_flags_with_a_place_of_their_own() -> None:
    found = parse("-H", "localhost:2", "--output-filename", "out", "--verbose", "--mpi", "x")
    assert (found.hosts, found.output_dir, found.verbose) == ("localhost:2", "out", True)
    assert parse("-hostfile", "f", "x").hostfile == parse("--hostfile=f", "x").hostfile == "f"
    assert parse("-Hlocalhost:2", "x").hosts == "localhost:2"
    assert parse("-cb").check_build
    assert parse("-prefix-timestamp", "x").timestamps
    assert parse("--prefix-output-with-timestamp", "x").timestamps
    assert not found.timestamps


@pytest.mark.parametrize(
    ("flag", "variable"),
    [
        (("--fusion-threshold-mb", "64"), ("HOROVOD_FUSION_THRESHOLD", str(64 << 20))),
        (("--cache-capacity=0",), ("HOROVOD_CACHE_CAPACITY", "0")),
        (("--start-timeout", "7"), ("HOROVOD_START_TIMEOUT", "7")),
        (("--no-stall-check",), ("HOROVOD_STALL_CHECK_DISABLE", "1")),
        (("--stall-check",), ("HOROVOD_STALL_CHECK_DISABLE", "0")),
        (("--log-level", "DEBUG"), ("HOROVOD_LOG_LEVEL", "debug")),
        (("--log-without-timestamp",), ("HOROVOD_LOG_HIDE_TIME", "1")),
        (("--log-with-timestamp",), ("HOROVOD_LOG_HIDE_TIME", "0")),
        (("--log-hide-timestamp",), ("HOROVOD_LOG_HIDE_TIME", "1")),
        (("--no-log-hide-timestamp",), ("HOROVOD_LOG_HIDE_TIME", "0")),
        (("--timeline-filename", "/t.json"), ("HOROVOD_TIMELINE", "/t.json")),
        (("--no-autotune",), ("HOROVOD_AUTOTUNE", "0")),
        (("--cycle-time-ms", "2.5"), ("HOROVOD_CYCLE_TIME", "2.5")),
        (("--thread-affinity", "0,2"), ("HOROVOD_THREAD_AFFINITY", "0,2")),
    ],
    ids=str,
)
def test_flags_become_variables(flag: tuple[str, ...], variable: tuple[str, str]) -> None:
    settings = parse("-np", "1", *flag, "x").settings
    assert settings == dict([variable])
    load(settings)


def test_flags_that_are_not_given_set_nothing() -> None:
    assert parse("-np", "1", "x").settings == {}


def test_every_flag_of_the_table_is_known() -> None:
    for setting in SETTINGS:
        for flag in (setting.flag, setting.flag_off):
            if flag:
                value = () if setting.flag_off else (setting.choices[0] if setting.choices else "1",)
                assert setting.env in parse(flag, *value, "--min-np", "1", "x").settings


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--verbos", "x"), r"unknown flag --verbos; did you mean --verbose\?"),
        (("--timline", "t.json", "x"), r"unknown flag --timline; did you mean --timeline-filename\?"),
        (("-np", "2", "-H", "", "x"), r"-H or -hostfile is empty; leave it out"),
        (("--fusion-treshold-mb=3", "x"), r"did you mean --fusion-threshold-mb\?"),
        (("-n", "2", "x"), r"unknown flag -n; did you mean -np\?"),
        (("-x", "FOO=1", "x"), r"unknown flag -x; leave it out: every rank gets the whole environment"),
        (("--mpi=pmix", "x"), r"--mpi takes no value; received --mpi=pmix"),
        (("--min-np", "3", "-np", "2", "x"), r"--min-np 3 is more than -np 2"),
        (("--max-np", "3", "-np", "4", "x"), r"-np 4 is more than --max-np 3"),
        (("--min-np", "3", "--max-np", "2", "x"), r"--min-np 3 is more than --max-np 2"),
        (("--reset-limit", "3", "-np", "2", "x"), r"--reset-limit: for elastic jobs; add --min-np"),
        (("--checkpoint-dir", "d", "-np", "2", "x"), r"--checkpoint-dir: only elastic jobs .* add --min-np"),
        (("--mpi", "--min-np", "2", "x"), r"--mpi cannot start an elastic job: MPI ends all ranks when one is lost"),
        (("--host-discovery-script", "h", "-H", "a:2", "-np", "2", "x"), r"--host-discovery-script, or -H"),
        (("--min-np", "2", "--slots", "2", "x"), r"--slots-per-host is for hosts of --host-discovery-script"),
        (("--min-np", "2", "--blacklist-cooldown-range", "9", "3", "x"), r"the smaller one first, .*received 9 3"),
        (("--min-np", "2", "--chaos", "soon", "x"), r"--chaos must be a time such as 30s"),
        (("--ssh-port", "two", "x"), r"--ssh-port must be a whole number; received 'two'"),
        (("-p", "99999", "x"), r"--ssh-port must be between 1 and 65535; received 99999"),
        (("--mpi-args",), r"expected one argument"),
        (("-np", "two", "x"), r"-np must be a whole number; received 'two'"),
        (("-np",), r"expected one argument"),
        (("--gloo", "--mpi", "x"), r"not allowed with"),
        (("-H", "a:1", "-hostfile", "f", "x"), r"not allowed with"),
        (("--cache-capacity", "-1", "x"), r"--cache-capacity must be a whole number of at least 0"),
        (("--log-level", "loud", "x"), r"--log-level must be one of"),
        (("--config-file", "/no/such", "x"), r"--config-file /no/such: No such file"),
    ],
    ids=str,
)
def test_wrong_command_lines(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(*argv)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        # Slips of the pen.
        ("--hostfil", "--hostfile"),
        ("-hosfile", "-hostfile"),
        ("--verbos", "--verbose"),
        ("--versoin", "--version"),
        ("--hepl", "--help"),
        ("--num_proc", "--num-proc"),
        ("--np", "-np"),
        ("--log-lvl", "--log-level"),
        ("--no-stallcheck", "--no-stall-check"),
        ("--prefix-timestamp", "-prefix-timestamp"),
        # Words left out.
        ("--timeline", "--timeline-filename"),
        ("--output", "--output-filename"),
        ("--stall-check-time-seconds", "--stall-check-warning-time-seconds"),
        # Other launchers' words for the same.
        ("-n", "-np"),
        ("--nproc-per-node", "-np"),
        ("--nproc_per_node", "-np"),
        ("--ntasks", "-np"),
        ("--host", "-H"),
        ("-machinefile", "-hostfile"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"^unknown flag {typed}; did you mean {meant}\?$"):
        parse(typed, "x")


@pytest.mark.parametrize(
    "typed",
    [
        *("--foo", "-e", "-q", "--no", "--log", "--file", "--time", "--role", "--start-method"),
        *("--map-by", "--bind-to", "--rank-by", "--mca", "--display-map", "--allow-run-as-root", "--wdir"),
        *("--monitor-interval", "--tee", "--redirects", "--run-path"),
        *("--mem", "--gpus", "--label", "--cpus-per-task", "--kill-on-bad-exit", "--exclusive"),
    ],
)
def test_nothing_far_fetched_is_suggested(typed: str) -> None:
    with pytest.raises(UsageError, match=rf"^unknown flag {typed}; see horovodrun --help$"):
        parse(typed, "x")


def test_what_job_files_say_of_other_hosts_is_accepted_and_told() -> None:
    assert parse("x").far == ()
    options = parse(
        "-p", "22", "-i", "key", "--network-interface", "eth0", "--disable-cache", "--mpi-args", "--mca btl tcp",
        "--tcp", "--binding-args=-bind-to none", "--network-interfaces", "lo,eth1", "python", "--tcp",
    )  # fmt: skip
    assert options.command == ("python", "--tcp")
    assert set(options.far) == {
        "--ssh-port", "--ssh-identity-file", "--network-interface", "--disable-cache", "--mpi-args", "--tcp",
        "--binding-args", "--network-interfaces",
    }  # fmt: skip
    assert (options.ssh_port, options.ssh_identity_file, options.tcp) == (22, "key", True)
    assert options.interfaces == ("lo", "eth1", "eth0")
    assert options.mpi_args == ("--mca", "btl", "tcp")
    assert options.binding_args == ("-bind-to", "none")


@pytest.mark.parametrize("flag", [("--mpi-args", "--oversubscribe"), ("--output-filename", "-odd-")])
def test_a_value_may_look_like_a_flag(flag: tuple[str, str]) -> None:
    options = parse(*flag, "x")
    assert options.command == ("x",)
    assert not options.oversubscribe


HOROVOD_LAYOUT = """
controller: gloo
params:
    fusion_threshold_mb: 32
    cycle_time_ms: 5
    cache_capacity: 2048
    hierarchical_allreduce: true
autotune:
    enabled: false
    log_file: tune.csv
timeline:
    filename: t.json
    mark_cycles: true
stall_check:
    enabled: false
    warning_time_seconds: 120
    shutdown_time_seconds: 240.5
library_options:
    mpi_threads_disable: true
    num_nccl_streams: 2
    thread_affinity: 0,1
logging:
    level: INFO
    with_timestamp: false
"""


def test_yaml_file_in_horovods_layout(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(HOROVOD_LAYOUT)
    assert parse("--config-file", str(path), "x").file_settings == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_CACHE_CAPACITY": "2048",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_AUTOTUNE_LOG": "tune.csv",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240.5",
        "HOROVOD_MPI_THREADS_DISABLE": "1",
        "HOROVOD_NUM_NCCL_STREAMS": "2",
        "HOROVOD_THREAD_AFFINITY": "0,1",
        "HOROVOD_LOG_LEVEL": "info",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }


def test_horovods_older_key_for_the_time_in_logs() -> None:
    assert parse_yaml({"logging": {"hide_timestamp": True}}, "c.yaml") == {"HOROVOD_LOG_HIDE_TIME": "1"}
    assert parse_yaml({"logging": {"hide_timestamp": False}}, "c.yaml") == {"HOROVOD_LOG_HIDE_TIME": "0"}


def test_empty_yaml_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing yet\n")
    assert parse("--config-file", str(path), "x").file_settings == {}
    assert parse_yaml({"params": None, "timeline": {"filename": None}}, "c.yaml") == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"params": {"cache_capacty": 1}},
            r"c.yaml: unknown key params.cache_capacty; did you mean params.cache_capacity\?",
        ),
        ({"params": 3}, r"c.yaml: section params"),
        ({"stall-check": {"enabled": True}}, r"c.yaml: unknown section stall-check; did you mean stall_check\?"),
        ({"verbose": True}, r"c.yaml: unknown section verbose$"),
        ({"controller": "nccl"}, r"controller must be gloo or mpi; received 'nccl'"),
        ({"stall_check": {"enabled": "perhaps"}}, r"c.yaml: stall_check.enabled must be one of 1/true"),
        (
            {"params": {"cache_capacity": True}},
            r"c.yaml: params.cache_capacity must be a whole number; received 'True'",
        ),
        (["params"], r"c.yaml: expected sections"),
        ({"timeline": {"filename": ["a"]}}, r"c.yaml: timeline.filename must be a single value; received \['a'\]"),
    ],
    ids=str,
)
def test_wrong_yaml(content: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_yaml(content, "c.yaml")


def test_text_that_is_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: [1")
    with pytest.raises(UsageError, match="is not YAML"):
        parse("--config-file", str(path), "x")
