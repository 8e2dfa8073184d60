"""The command line of poprun: spellings, errors, files of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from poprun.flags import OPTIONS, CommandLineError, help_text, parse, read_config, write_config


def test_options_may_have_their_value_behind_or_beside_them_and_the_program_keeps_its_own() -> None:
    line = parse(
        ["--num-replicas=4", "--num-instances", "2", "-vv", "-H", "a,b", "python", "main.py", "--num-replicas=9"]
    )
    assert line.given == {"num-replicas": 4, "num-instances": 2, "host": "a,b"}
    assert (line.verbosity, line.command) == (2, ("python", "main.py", "--num-replicas=9"))
    assert line["ipus-per-replica"] == 1 and line["numa-aware"] is False and line["offline-mode"] is True


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--numa-aware=yes"], True), (["--numa-aware", "on"], True), (["--numa-aware", "1"], True),
        (["--numa-aware=TRUE"], True), (["--numa-aware", "no"], False), (["--numa-aware=off"], False),
        (["--numa-aware", "0"], False), (["--numa-aware"], True),
    ],
)  # fmt: skip
def test_booleans_are_spelt_in_many_ways(words: list[str], value: bool) -> None:
    line = parse([*words, "echo", "1"])
    assert (line["numa-aware"], line.command) == (value, ("echo", "1"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-replica=4"], "unknown option --num-replica; did you mean --num-replicas?"),
        (["--frobnicate"], "unknown option --frobnicate; see poprun --help"),
        (["-n", "4"], "unknown option -n; see poprun --help"),
        (["--num-replicas"], "--num-replicas needs a value"),
        (["--num-replicas=0"], "--num-replicas takes a whole number of at least 1; received '0'"),
        (["--numa-aware=maybe"], "--numa-aware takes yes or no (on/off, 1/0, true/false); received 'maybe'"),
        (["--vipu-server-port=99999"], "--vipu-server-port takes a whole number of at least 1 and at most 65535"),
        (["--vipu-server-timeout=-1"], "--vipu-server-timeout takes a number of seconds above 0; received '-1'"),
        (["--version-format=xml"], "--version-format takes text, full-text or full-json; received 'xml'"),
        (["--host-subnet=banana"], "--host-subnet takes a subnet such as 10.1.0.0/16; received 'banana'"),
    ],
)
def test_a_wrong_option_says_what_is_right(words: list[str], message: str) -> None:
    with pytest.raises(CommandLineError) as caught:
        parse([*words])
    assert message in str(caught.value)


def test_options_about_the_hardware_are_checked_and_said_to_have_no_effect() -> None:
    line = parse(["--vipu-partition=p", "--reset-partition", "auto", "--offline-mode=yes", "--num-replicas=2", "x"])
    assert line.idle() == ["--vipu-partition (no V-IPU here)", "--reset-partition (no V-IPU here)"]
    assert "--offline-mode" in parse(["--offline-mode=no", "x"]).idle()[0]


def test_help_names_every_option() -> None:
    text = help_text()
    assert all(f"--{name} " in text for name in OPTIONS)


def test_settings_go_to_a_file_and_come_back_and_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    path = str(tmp_path / "settings.json")
    given = parse(
        ["--num-replicas=4", "--numa-aware", "--mpi-global-args=-x A=1", f"--export-config={path}", "x"]
    ).given
    write_config(path, given, may_overwrite=False)
    assert read_config(path) == {"num-replicas": 4, "numa-aware": True, "mpi-global-args": "-x A=1"}
    with pytest.raises(CommandLineError, match="the file exists; add --overwrite-config=yes"):
        write_config(path, given, may_overwrite=False)
    write_config(path, {"num-replicas": 8}, may_overwrite=True)
    assert read_config(path) == {"num-replicas": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"), ("[]", "expected an object"), ('{"num-replikas": 1}', "did you mean 'num-replicas'?"),
        ('{"num-replicas": "x"}', "num-replicas takes a whole number"),
        ('{"dry-run": true}', "unknown option 'dry-run'"),
    ],
)  # fmt: skip
def test_a_wrong_file_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(CommandLineError) as caught:
        read_config(str(path))
    assert message in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(CommandLineError, match="--import-config /nowhere: No such file"):
        read_config("/nowhere")
