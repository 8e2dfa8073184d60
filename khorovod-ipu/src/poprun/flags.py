"""The command line of ``poprun``, and files of ``--import-config`` and ``--export-config``. Pure except for files."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from khorovod_ipu.names import nearest

__all__ = ["OPTIONS", "CommandLine", "CommandLineError", "Option", "help_text", "parse", "read_config", "write_config"]


class CommandLineError(ValueError):
    """The command line, or a file that it names, is invalid."""


_TRUE, _FALSE = ("yes", "on", "1", "true", "y"), ("no", "off", "0", "false", "n")
_V_IPU = "no V-IPU here"
_NOTHING = "nothing to do here"


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("yes or no (on/off, 1/0, true/false)")


def _reset(text: str) -> str | bool:
    return "auto" if text.lower() == "auto" else _boolean(text)


def _checked(make: Callable[[str], Any], expected: str, is_right: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return a function that converts a string to a value; its error names the expected format."""

    def read(text: str) -> Any:
        try:
            value = make(text)
        except ValueError:
            raise ValueError(expected) from None
        if not is_right(value):
            raise ValueError(expected)
        return value

    return read


def _whole(least: int, most: int = 1 << 31) -> Callable[[str], int]:
    expected = f"a whole number of at least {least}" + (f" and at most {most}" if most < 1 << 31 else "")
    return _checked(int, expected, lambda number: least <= number <= most)


_text = _checked(str, "some text", bool)
_seconds = _checked(float, "a number of seconds above 0", lambda number: 0 < number < float("inf"))
_subnet = _checked(lambda text: str(ipaddress.ip_network(text, strict=False)), "a subnet such as 10.1.0.0/16", bool)
_FORMATS = ("text", "full-text", "full-json")
_version_format = _checked(str, "text, full-text or full-json", _FORMATS.__contains__)


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        read: converts a string to a value; its error names the expected format.
        help: text for ``--help``.
        default: its default value.
        idle: reason why it has no effect; empty if it has one.
        is_own: whether the option does not exist in PopRun itself.
    """

    read: Callable[[str], Any]
    help: str
    default: Any = None
    idle: str = ""
    is_own: bool = False

    @property
    def is_flag(self) -> bool:
        """Return whether the option may be given without a value, which then is yes."""
        return self.read in (_boolean, _reset)


OPTIONS: Mapping[str, Option] = {
    "host": Option(_text, "hosts, such as host0,host1 or host[0-2,4]; instances are divided evenly (-H)"),
    "hostfile": Option(_text, "file with a host on each line, instead of --host"),
    "num-replicas": Option(_whole(1), "replicas of all instances together", 1),
    "num-instances": Option(_whole(1), "processes; replicas are divided evenly (default: 1, or one on each host)"),
    "ipus-per-replica": Option(_whole(1), "devices of one replica; told to the program", 1),
    "num-ilds": Option(_whole(1), "IPU-Link domains; only shown in the topology (default: one for each host)"),
    "executable-cache-path": Option(_text, "told to the program; nothing is compiled"),
    "mpi-global-args": Option(str, "arguments of mpirun: -x NAME[=VALUE] and a few others are heeded", ""),
    "mpi-local-args": Option(str, "as --mpi-global-args", ""),
    "numa-aware": Option(_boolean, "bind the instances of a host to its NUMA nodes in turn", False),
    "print-topology": Option(_boolean, "print how hosts, instances and replicas lie", False),
    "only-output-from-instance": Option(_whole(0), "show the output of this one; the last lines of any that fails"),
    "offline-mode": Option(_boolean, "without IPUs, which is always so", True, "there is no other mode here"),
    "host-subnet": Option(_subnet, "network through which hosts talk; found by itself otherwise"),
    "import-config": Option(_text, "read settings from a file; the command line has the last word"),
    "export-config": Option(_text, "write the settings to a file"),
    "overwrite-config": Option(_boolean, "whether that file may exist already", False),
    "version-format": Option(_version_format, "text, full-text or full-json: with what it runs on", "text"),
    "dry-run": Option(_boolean, "say what would be started, and start nothing", False, is_own=True),
    "vipu-server-host": Option(_text, "server of the V-IPU", "localhost", _V_IPU),
    "vipu-server-port": Option(_whole(1, 65535), "its port", 8090, _V_IPU),
    "vipu-server-timeout": Option(_seconds, "patience with it, in seconds", 120.0, _V_IPU),
    "vipu-partition": Option(_text, "partition to use or make", None, _V_IPU),
    "vipu-partition-attempts": Option(_whole(1), "how often to look whether it is active", 1, _V_IPU),
    "update-partition": Option(_boolean, "change an unsuitable one", False, _V_IPU),
    "reset-partition": Option(_reset, "reset it before use", "auto", _V_IPU),
    "remove-partition": Option(_boolean, "remove it afterwards", True, _V_IPU),
    "vipu-cluster": Option(_text, "where to make it (deprecated)", None, _V_IPU),
    "vipu-allocation": Option(_text, "where to make it", None, _V_IPU),
    "sync-type": Option(_text, "how devices wait for each other", None, "no devices here"),
    "allow-run-as-root": Option(_boolean, "root may always run jobs", True, "root may always run jobs"),
    "synchronise-python-venv": Option(_boolean, "copy the environment to all hosts", False, _NOTHING),
    "synchronise-poplar-sdk": Option(_boolean, "copy the SDK to all hosts", False, _NOTHING),
    "distribute-ssh-key": Option(_boolean, "copy the ssh key to all hosts", False, _NOTHING),
}
"""Without leading dashes."""

_NOT_IN_FILES = ("import-config", "export-config", "overwrite-config", "version-format", "dry-run")
_SO_ANYWAY = ("offline-mode", "allow-run-as-root")
_SHORT = {"-H": "host"}


@dataclass
class CommandLine:
    """The command line.

    Attributes:
        given: values of the given options, by name.
        command: program and arguments.
        verbosity: 0, 1 for ``-v``, 2 for ``-vv``.
        wants_help: whether to print only the help.
        wants_version: whether to print only the version.
    """

    given: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    verbosity: int = 0
    wants_help: bool = False
    wants_version: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, OPTIONS[name].default)

    def idle(self) -> list[str]:
        """Return the given options that have no effect, with the reasons."""
        return [
            f"--{name} ({OPTIONS[name].idle})"
            for name, value in self.given.items()
            if OPTIONS[name].idle and not (value is True and name in _SO_ANYWAY)
        ]


def parse(argv: Sequence[str]) -> CommandLine:
    """Parse a command line: options, then the program as the first word that is not an option.

    Args:
        argv: the arguments, without the name ``poprun``.

    Raises:
        CommandLineError: an option is unknown, or a value is invalid.
    """
    found, words = CommandLine(), list(argv)
    while words:
        word = words.pop(0)
        if word == "--" or not word.startswith("-") or word == "-":
            found.command = tuple(words if word == "--" else [word, *words])
            break
        if word in ("-v", "-vv", "--verbose", "--vv"):
            found.verbosity += 2 if word.endswith("vv") else 1
        elif word in ("-h", "--help"):
            found.wants_help = True
        elif word == "--version":
            found.wants_version = True
        else:
            _option(found, word, words)
    return found


def _option(found: CommandLine, word: str, rest: list[str]) -> None:
    dashed, equals, text = word.partition("=")
    name = _SHORT.get(dashed, dashed.removeprefix("--"))
    if name not in OPTIONS or not (dashed.startswith("--") or dashed in _SHORT):
        raise CommandLineError(f"unknown option {dashed}{nearest(name, OPTIONS, '--') or '; see poprun --help'}")
    option = OPTIONS[name]
    if not equals:
        if option.is_flag and not _is_value(option, rest):
            text = "yes"
        elif not rest:
            raise CommandLineError(f"{dashed} needs a value")
        else:
            text = rest.pop(0)
    found.given[name] = _value(dashed, option, text)


def _is_value(option: Option, rest: Sequence[str]) -> bool:
    """Return whether the next word is the value of a flag, not the program or another option."""
    try:
        option.read(rest[0])
    except (ValueError, IndexError):
        return False
    return True


def _value(shown: str, option: Option, text: str) -> Any:
    try:
        return option.read(text)
    except ValueError as error:
        raise CommandLineError(f"{shown} takes {error}; received {text!r}") from None


def read_config(path: str) -> dict[str, Any]:
    """Read the settings that ``write_config`` wrote.

    Raises:
        CommandLineError: the file cannot be read, has another format, or names an unknown option or an invalid value.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandLineError(f"--import-config {path}: {error.strerror}") from error
    except ValueError as error:
        raise CommandLineError(f"--import-config {path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CommandLineError(f"--import-config {path}: expected an object of options and values")
    values = {}
    for name, value in data.items():
        if name not in OPTIONS or name in _NOT_IN_FILES:
            known = [option for option in OPTIONS if option not in _NOT_IN_FILES]
            raise CommandLineError(f"{path}: unknown option {name!r}{nearest(name, known)}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        values[name] = _value(f"{path}: {name}", OPTIONS[name], text)
    return values


def write_config(path: str, given: Mapping[str, Any], may_overwrite: bool) -> None:
    """Write settings to a file.

    Raises:
        CommandLineError: the file exists, or cannot be written.
    """
    values = {name: value for name, value in given.items() if name not in _NOT_IN_FILES}
    try:
        with open(path, "w" if may_overwrite else "x", encoding="utf-8") as file:
            file.write(json.dumps(values, indent=2) + "\n")
    except FileExistsError:
        raise CommandLineError(
            f"--export-config {path}: the file exists; add --overwrite-config=yes to replace it"
        ) from None
    except OSError as error:
        raise CommandLineError(f"--export-config {path}: {error.strerror}") from error


def help_text() -> str:
    """Return the text of ``poprun --help``."""
    lines = ["usage: poprun [options] program [arguments]", "", "  -v, -vv, --verbose, --vv", "      say more"]
    for name, option in OPTIONS.items():
        default = "" if option.default is None or (option.is_flag and option.default is False) else option.default
        shown = ("yes" if default is True else str(default)) if default != "" else ""
        notes = [f"default: {shown}"] if shown and not option.idle else []
        notes += [f"accepted, without effect: {option.idle}"] if option.idle else []
        notes += ["khorovod's own"] if option.is_own else []
        value = " [yes|no]" if option.is_flag else " VALUE"
        lines += [f"  --{name}{value}", f"      {option.help}" + (f" ({'; '.join(notes)})" if notes else "")]
    return "\n".join([*lines, "  --help, --version"])
