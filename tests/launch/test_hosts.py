"""-H and host files."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod.launch import frames, host_checks
from horovod.launch.agent import problems
from horovod.launch.assemble import named_hosts
from horovod.launch.hosts import HostSlots, Place, parse_hostfile, parse_hosts, place
from horovod.launch.ssh import Access, command_line, diagnose


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost:2", [HostSlots("localhost", 2)]),
        ("a:2,b:4", [HostSlots("a", 2), HostSlots("b", 4)]),
        (" a:2 , b ", [HostSlots("a", 2), HostSlots("b", 1)]),
        ("[::1]:3", [HostSlots("::1", 3)]),
        ("[fe80::1]", [HostSlots("fe80::1", 1)]),
        ("me@a.b-c_d:2,me@[fd77::3%eth0]:4", [HostSlots("me@a.b-c_d", 2), HostSlots("me@fd77::3%eth0", 4)]),
    ],
)
def test_hosts_are_read(text: str, hosts: list[HostSlots]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a:",
        "a:x",
        "a:0",
        ":2",
        "a:-1",
        "-oProxyCommand=x:1",
        "x@-o:1",
        "a:2;b:2",
        "a b",
        "[::1",
        "[::1]2",
        "[a]:2",
        "a:2:3",
        "a:00",
        "a:\u00b2",
        "a:9999999",
        "@a",
        "'a':2",
    ],
)
def test_wrong_hosts_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="-H"):
        parse_hosts(text)


def test_an_error_quotes_the_entry_as_it_was_typed() -> None:
    with pytest.raises(ValueError, match=r"^-H localhost,2: 2 is no host; give .* after a colon: host:2$"):
        parse_hosts("localhost,2")
    with pytest.raises(ValueError, match=r"received 'a:x'$"):
        parse_hosts("a:x")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=2\nb slots=3\n", [HostSlots("a", 2), HostSlots("b", 3)]),
        ("# two hosts\n\na slots=2  # the first\n   \nb\n", [HostSlots("a", 2), HostSlots("b", 1)]),
        ("a:4\nb slots = 2 max_slots= 8", [HostSlots("a", 4), HostSlots("b", 2)]),
        ("::1 slots=2", [HostSlots("::1", 2)]),
        ("\ufeffa\tslots=2\r\nme@b:3\r\n", [HostSlots("a", 2), HostSlots("me@b", 3)]),
    ],
)
def test_hostfile_is_read(text: str, hosts: list[HostSlots]) -> None:
    assert parse_hostfile(text, "hosts.txt") == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"hosts.txt names no host"),
        ("# nothing\n", r"hosts.txt names no host"),
        ("a slots=2\nb slots=two", r"hosts.txt, line 2.*received 'b slots=two'"),
        ("a slots=", r"hosts.txt, line 1.*expected `host slots=n`"),
        ("a slots 2", r"hosts.txt, line 1.*expected `host slots=n`"),
        ("slots=2", r"hosts.txt, line 1"),
        ("a:2,b:2", r"hosts.txt, line 1"),
        ("a slot=2", r"hosts.txt, line 1.*expected `host slots=n`"),
    ],
)
def test_wrong_hostfile_is_an_error_that_names_the_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_hostfile(text, "hosts.txt")


def local(name: str) -> bool:
    return name in ("localhost", "127.0.0.1")


def test_hosts_fill_up_in_order() -> None:
    hosts = [HostSlots("a", 2), HostSlots("localhost", 2), HostSlots("b", 2)]
    assert place(hosts, 5, local) == [Place("a", 2, False), Place("localhost", 2, True), Place("b", 1, False)]


def test_names_of_this_host_are_one_host() -> None:
    hosts = [HostSlots("localhost", 1), HostSlots("a", 1), HostSlots("127.0.0.1", 2)]
    assert place(hosts, 4, local) == [Place("localhost", 3, True), Place("a", 1, False)]


def test_a_name_given_twice_is_one_host() -> None:
    assert place([HostSlots("a", 1), HostSlots("b", 1), HostSlots("a", 1)], 3, local) == [
        Place("a", 2, False),
        Place("b", 1, False),
    ]


def test_too_few_slots() -> None:
    with pytest.raises(ValueError, match=r"Requested more processes \(3\) than there are available slots \(2\)"):
        place([HostSlots("localhost", 2)], 3, local)


def test_another_host_that_gets_no_rank_does_not_matter() -> None:
    assert place([HostSlots("localhost", 2), HostSlots("far", 2)], 2, local) == [Place("localhost", 2, True)]


def test_what_is_no_text_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"\x7fELF\xd0\x00\n")
    with pytest.raises(ValueError, match=r"program, line 1: expected"):
        named_hosts("", str(tmp_path / "program"))


_CHANGED = """@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Host key for [b]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""
_NO_MSGSPEC = "File '/x/horovod/launch/frames.py', line 20\nModuleNotFoundError: No module named 'msgspec'"


@pytest.mark.parametrize(
    ("status", "stderr", "noise", "said"),
    [
        (0, "", "", "a start file such as ~/.bashrc may end it there"),
        (1, "", "", "a start file such as ~/.bashrc may end it there"),
        (1, "No home\n", "This account is not available.\n", "account is not available.; perhaps ForceCommand"),
        (None, "", "Press any key\n", "b did not answer within 30 s (Press any key)"),
        (255, "", "", "no kind of key in common"),
        (255, "No user exists for uid 12345\n", "", "(No user exists for uid 12345); give that user"),
        (255, "me@b: Permission denied (publickey).\n", "", "hand it to ssh-agent with ssh-add"),
        (255, "me@b: Permission denied (publickey).\n", "", "refused the key (me@b: Permission denied (publickey)"),
        (255, _CHANGED, "", "`ssh-keygen -R '[b]:2222'` forgets"),
        (255, "f: line 2: Bad configuration option: x\nterminating, 1 bad configuration options", "", "line 2: Bad"),
        (1, "Fatal Python error: init: x\n<no Python frame>\n", "", "(Fatal Python error: init: x)"),
        (1, _NO_MSGSPEC, "", "(ModuleNotFoundError: No module named 'msgspec')"),
    ],
)  # fmt: skip
def test_why_there_is_no_agent(status: int | None, stderr: str, noise: str, said: str) -> None:
    assert said in diagnose("b", Access("/python"), status, stderr, noise)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_settings_of_ssh_that_would_keep_it_from_talking_are_overridden(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("IgnoreUnknown UseKeychain\nUseKeychain yes\nStdinNull yes\nSessionType none\n")
    words = command_line("b", Access("/python"))
    asked = ["ssh", "-G", "-F", str(tmp_path / "config"), *words[1 : words.index("--")], "--", "b"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert not {"stdinnull yes", "sessiontype none"} & {*said.splitlines()}
    given = dict(line.split(" ", 1) for line in said.splitlines())
    # While ssh logs in, it waits at most so long for sshd, which may have to ask a slow directory for the keys.
    assert int(given["serveraliveinterval"]) * int(given["serveralivecountmax"]) >= 30


def test_a_program_that_a_host_cannot_run_is_told_apart_from_none(tmp_path: Path) -> None:
    (tmp_path / "here").touch(0o600)
    assert problems(str(tmp_path), "./none", "/bin", [])[0].startswith(f"there is no {tmp_path}/none; copy it there")
    assert problems(str(tmp_path), "./here", "/bin", [])[0].startswith(f"{tmp_path}/here is not executable there")
    assert problems(str(tmp_path), "sh", "/bin", []) == []


def test_what_a_login_shell_prints_without_end_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    incoming, theirs = os.pipe()
    wire = frames.AgentWire(incoming, incoming, is_launcher=True)
    monkeypatch.setattr(host_checks, "Connection", lambda *_: SimpleNamespace(wire=wire))
    check = host_checks.HostCheck("b", Access("python", command="true", path="/bin"))
    with open(theirs, "wb", buffering=0) as pipe:
        while not check.is_done:
            pipe.write(b"hello\n" * 5000)
            check.tend()
    assert "such as 'hello'; a start file of its login shell" in check.problems[0]
    os.close(incoming)
