"""The command line of ``horovodrun`` and the YAML file of ``--config-file``; settings come from ``config``'s table."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from horovod.config import SETTINGS, Setting, parse, render
from horovod.launch.elastic_options import FLAGS as ELASTIC_FLAGS
from horovod.launch.elastic_options import ElasticOptions, elastic_options
from horovod.launch.plan import Rotation
from horovod.phrases import nearest

__all__ = ["Options", "UsageError", "parse_flags", "parse_yaml"]

#: Limits of ``--output-max-bytes`` and ``--output-max-backups``.
_FEWEST_BYTES, _MOST_BACKUPS = 1000, 1000
#: Flags of mpirun, srun and torchrun, and our equivalents.
_SAME = {
    "-n": "-np", "--ntasks": "-np", "--nproc-per-node": "-np", "--host": "-H", "-host": "-H",
    "-machinefile": "-hostfile",
}  # fmt: skip


class UsageError(ValueError):
    """The command line, or the file it names, is wrong."""


@dataclass(frozen=True)
class Options:
    """A parsed command line."""

    num_proc: int | None = None  # number of ranks; None when not given
    hosts: str = ""  # value of `-H`, or empty
    hostfile: str = ""  # value of `-hostfile`, or empty
    command: tuple[str, ...] = ()  # program and arguments
    output_dir: str = ""  # value of `--output-filename`, or empty
    rotation: Rotation = field(default_factory=Rotation)  # values of `--output-max-bytes` and `--output-max-backups`
    timestamps: bool = False  # whether each line of output begins with date and time
    verbose: bool = False  # whether to print more
    check_build: bool = False  # whether only to print the features of this installation
    check: bool = False  # whether to test the hosts instead of running anything
    doctor: str = ""  # folder of flight recorder dumps to read instead of running anything, or empty
    settings: Mapping[str, str] = field(default_factory=dict)  # variables that flags set
    file_settings: Mapping[str, str] = field(default_factory=dict)  # variables that the YAML file sets
    oversubscribe: bool = False  # whether to allow very many ranks for each core
    far: tuple[str, ...] = ()  # long names of the given flags that concern other hosts only
    ssh_port: int = 0  # value of `-p`; 0 when not given
    ssh_identity_file: str = ""  # value of `-i`, or empty
    interfaces: tuple[str, ...] = ()
    python: str = ""  # Python of other hosts, or empty
    controller: str = ""  # "gloo", "mpi", "jsrun", or empty
    mpi_args: tuple[str, ...] = ()  # more flags for mpirun
    binding_args: tuple[str, ...] = ()  # flags for mpirun that place the ranks; they replace ours
    tcp: bool = False  # whether not to use InfiniBand
    elastic: ElasticOptions | None = None  # options of an elastic job; None for a job of fixed size


_CONTROLLER, _CONTROLLERS, _ENGINES = "HOROVOD_CONTROLLER", ("gloo", "mpi", "jsrun"), ("gloo", "mpi")
_FAR = (
    (("-p", "--ssh-port"), "PORT", "port of sshd"),
    (("-i", "--ssh-identity-file"), "FILE", "private key for ssh"),
    (("--network-interface",), "NAME", "deprecated, as --network-interfaces"),
    (("--network-interfaces",), "NAMES", "network interfaces that all hosts have and ranks talk over, as a list a,b"),
    (("--python",), "PATH", "Python of the other hosts (default: the same path as here)"),
    (("--disable-cache",), "", "accepted; hosts are always checked"),
    (("--tcp",), "", "do not use InfiniBand"),
    (("--mpi-args",), "ARGS", "more flags for mpirun, with --mpi"),
    (("--binding-args",), "ARGS", "flags for mpirun that say where ranks run, with --mpi"),
)
"""Flags about how other hosts are reached; job files of one host carry them, too."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_flags(argv: Sequence[str], version: str, allocated: Callable[[], int] = int) -> Options:
    """Read a command line; the command is everything from the first word that is not a flag. An elastic job without
    ``-np`` starts on the ``allocated`` slots of a scheduler.

    Raises:
        UsageError: an unknown flag (the message names the nearest known one), a wrong value, or a wrong file.
        SystemExit: after ``--help`` and ``--version``.
    """
    parser, takes_value = _parser(version)
    flags, command = _split(argv, takes_value)
    found = vars(parser.parse_args(flags))
    if "" in (found["hosts"], found["hostfile"]):
        raise UsageError("-H or -hostfile is empty; leave it out to use this host, or the hosts of the scheduler")
    port = _whole(found["--ssh-port"], "--ssh-port")
    if port is not None and not 0 < port < 1 << 16:
        raise UsageError(f"--ssh-port must be between 1 and 65535; received {port}")
    interfaces = [found["--network-interfaces"] or "", found["--network-interface"] or ""]
    in_file = _read_yaml(found["config_file"]) if found["config_file"] else {}
    settings = {}
    for setting in SETTINGS:
        text = found.get(setting.env)
        if text is not None:
            settings[setting.env] = _to_variable(setting, text, setting.flag)
    controller = next((name for name in _CONTROLLERS if found[name]), in_file.get(_CONTROLLER, ""))
    num_proc = _whole(found["num_proc"], "-np")
    elastic = _elastic(found, num_proc, controller, allocated)
    if controller in _ENGINES:
        settings[_CONTROLLER] = controller  # ranks on several hosts read it, too
    return Options(
        num_proc=num_proc if elastic is None else elastic.num_proc,
        hosts=found["hosts"] or "",
        hostfile=found["hostfile"] or "",
        command=tuple(command),
        output_dir=found["output_filename"],
        rotation=_rotation(found, controller),
        timestamps=found["prefix_output_with_timestamp"],
        verbose=found["verbose"],
        check_build=found["check_build"],
        check=found["check"],
        doctor=found["doctor"],
        settings=settings,
        file_settings={name: text for name, text in in_file.items() if name != _CONTROLLER},
        oversubscribe=found["oversubscribe"],
        far=tuple(names[-1] for names, _, _ in _FAR if found[names[-1]]),
        ssh_port=port or 0,
        ssh_identity_file=found["--ssh-identity-file"] or "",
        interfaces=tuple(name.strip() for name in ",".join(interfaces).split(",") if name.strip()),
        python=found["--python"] or "",
        controller=controller,
        mpi_args=_words(found["--mpi-args"], "--mpi-args"),
        binding_args=_words(found["--binding-args"], "--binding-args"),
        tcp=bool(found["--tcp"]),
        elastic=elastic,
    )


def _elastic(
    found: Mapping[str, Any], num_proc: int | None, controller: str, allocated: Callable[[], int]
) -> ElasticOptions | None:
    given = {names[0]: found[names[0]] for names, _, _ in ELASTIC_FLAGS}
    is_named = num_proc or found["hosts"] or found["hostfile"] or given["--host-discovery-script"]
    try:
        elastic = elastic_options(given, num_proc, 0 if is_named or not any(given.values()) else allocated())
    except ValueError as error:
        raise UsageError(str(error)) from None
    if elastic is None and found["HOROVOD_CHECKPOINT_DIR"]:
        raise UsageError("--checkpoint-dir: only elastic jobs write their state; add --min-np N")
    if elastic is not None and controller in ("mpi", "jsrun"):
        raise UsageError(
            f"--{controller} cannot start an elastic job: MPI ends all ranks when one is lost, and starts no others "
            f"later; leave --{controller} out, then ranks of other hosts are started over ssh"
        )
    if elastic is not None and elastic.script and (found["hosts"] or found["hostfile"]):
        raise UsageError("give --host-discovery-script, or -H or -hostfile, not both")
    return elastic


def _parser(version: str) -> tuple[_Parser, dict[str, int]]:
    """Return the parser, and the number of values of each flag."""
    parser = _Parser(
        prog="horovodrun",
        usage="horovodrun -np N [flags] command [arguments]",
        description="Start a command on N processes that train together, on this host or on several.",
        allow_abbrev=False,
    )
    takes_value = {"-h": 0, "--help": 0}

    def add(group: Any, *names: str, **options: Any) -> None:
        group.add_argument(*names, **options)
        takes_value.update(dict.fromkeys(names, 0 if "action" in options else options.get("nargs", 1)))

    add(parser, "-v", "--version", action="version", version=version, help="print the version and exit")
    add(parser, "-cb", "--check-build", action="store_true", help="print the features of this installation and exit")
    add(parser, "--check", action="store_true", help="test the hosts and the network between them, and exit")
    add(parser, "--doctor", default="", metavar="DIR", help="read flight recorders of a job that went wrong, and exit")
    add(parser, "-np", "--num-proc", metavar="N", help="number of processes")
    add(parser, "--output-filename", default="", metavar="DIR", help="also write DIR/rank.<n>/stdout and stderr")
    add(parser, "--output-max-bytes", metavar="N", help="rename a file of --output-filename before it is larger")
    add(
        parser,
        "--output-max-backups",
        metavar="K",
        help="how many renamed ones to keep of each: stdout.1 ... (default 1)",
    )
    add(
        parser, "-prefix-timestamp", "--prefix-output-with-timestamp", dest="prefix_output_with_timestamp",
        action="store_true", help="begin each line of output with date and time",
    )  # fmt: skip
    add(parser, "--verbose", action="store_true", help="print which ranks are started")
    add(parser, "--oversubscribe", action="store_true", help="allow very many ranks for each core")
    add(
        parser, "--config-file", default="", metavar="YAML", help="read settings from a file; flags and environment win"
    )
    where = parser.add_mutually_exclusive_group()
    add(where, "-H", "--hosts", metavar="HOST:SLOTS,...", help="where to run (default localhost:N)")
    add(where, "-hostfile", "--hostfile", metavar="FILE", help="the same, with lines `host slots=n`")
    how = parser.add_mutually_exclusive_group()
    add(how, "--gloo", action="store_true", help="start the ranks of other hosts over ssh; the default")
    add(how, "--mpi", action="store_true", help="let mpirun start the ranks")
    add(how, "--jsrun", action="store_true", help="let LSF's jsrun start the ranks")
    elsewhere = parser.add_argument_group("other hosts; without effect on one host")
    for names, value, text in _FAR:
        taken: dict[str, Any] = {"metavar": value} if value else {"action": "store_true"}
        add(elsewhere, *names, dest=names[-1], help=text, **taken)
    elastic = parser.add_argument_group("elastic jobs, see docs/elastic.md")
    for flags, value, text in ELASTIC_FLAGS:
        values: dict[str, Any] = {"metavar": tuple(value.split()), "nargs": 2} if " " in value else {"metavar": value}
        add(elastic, *flags, dest=flags[0], help=text, **values)
    active = parser.add_argument_group("settings, see docs/environment.md")
    idle = parser.add_argument_group("accepted, without effect in this version")
    for setting in (s for s in SETTINGS if s.flag):
        _add_setting(active if setting.in_effect else idle, setting, add)
    for name, value in (("--log-hide-timestamp", "0"), ("--no-log-hide-timestamp", "1")):
        # Horovod's older flags; the setting is inverted, as for `--log-with-timestamp`: 0 hides the time.
        add(idle, name, dest="HOROVOD_LOG_HIDE_TIME", action="store_const", const=value, help=argparse.SUPPRESS)
    return parser, takes_value


def _whole(text: str | None, flag: str) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        raise UsageError(f"{flag} must be a whole number; received {text!r}") from None


def _rotation(found: Mapping[str, Any], controller: str) -> Rotation:
    nbytes = _whole(found["output_max_bytes"], "--output-max-bytes")
    backups = _whole(found["output_max_backups"], "--output-max-backups")
    if nbytes is None and backups is None:
        return Rotation()
    if nbytes is None or not found["output_filename"] or controller in ("mpi", "jsrun"):
        raise UsageError(
            "--output-max-bytes, with or without --output-max-backups, needs --output-filename, without --mpi"
        )
    if nbytes < _FEWEST_BYTES or (backups is not None and not 0 <= backups <= _MOST_BACKUPS):
        raise UsageError(
            f"--output-max-bytes must be at least {_FEWEST_BYTES}, and --output-max-backups 0 to {_MOST_BACKUPS}; "
            f"received {nbytes} and {1 if backups is None else backups}"
        )
    return Rotation(nbytes, 1 if backups is None else backups)


def _words(text: str | None, flag: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"{flag} is not a command line ({error}); received {text!r}") from None


def _add_setting(group: Any, setting: Setting, add: Any) -> None:
    if not setting.flag_off:
        help_text = setting.help + f" One of {', '.join(setting.choices)}." * bool(setting.choices)
        add(group, setting.flag, dest=setting.env, metavar=_value_name(setting), help=help_text)
        return
    either = group.add_mutually_exclusive_group()
    if setting.inverted:
        helps = (f"the opposite of {setting.flag_off}", setting.help)
    else:
        helps = (setting.help, f"the opposite of {setting.flag}")
    for name, value, help_text in zip((setting.flag, setting.flag_off), "10", helps, strict=True):
        add(either, name, dest=setting.env, action="store_const", const=value, help=help_text)


def _value_name(setting: Setting) -> str:
    """Return the placeholder of the value in ``--help``: its unit, N, or the last word of the flag."""
    if setting.scale != 1 or setting.unit:
        return "MB" if setting.scale != 1 else setting.unit.upper()
    return setting.flag.rpartition("-")[2].upper() if isinstance(setting.default, str) else "N"


def _to_variable(setting: Setting, text: str, source: str) -> str:
    """Turn the value of a flag or a YAML key into the text of the environment variable."""
    try:
        if setting.inverted:
            return render(not parse(Setting("", False, ""), text, source))
        value = parse(setting, text, source)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return render(value * setting.scale if setting.scale != 1 and not isinstance(value, str) else value)


def _split(argv: Sequence[str], takes_value: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Split the command line into flags and command."""
    i, argv = 0, list(argv)
    while i < len(argv) and argv[i].startswith("-"):
        word = argv[i]
        if word == "--":
            return list(argv[:i]), list(argv[i + 1 :])
        name = word.partition("=")[0]
        if word in takes_value:
            if takes_value[word] == 1 and word.startswith("--") and i + 1 < len(argv):
                # Join flag and value, since the value may look like a flag, as arguments for MPI do.
                argv[i : i + 2] = [f"{word}={argv[i + 1]}"]
                i += 1
            else:
                i += 1 + takes_value[word]
        elif ("=" in word and takes_value.get(name)) or (word[:2] == "-H" and word[1] != "-"):
            i += 1
        elif name in takes_value:
            raise UsageError(f"{name} takes no value; received {word}")
        else:
            raise UsageError(_unknown(name, list(takes_value)))
    return list(argv[:i]), list(argv[i:])


def _unknown(name: str, known: Sequence[str]) -> str:
    """Return the error for a flag that is not in ``known``."""
    if name == "-x":
        return "unknown flag -x; leave it out: every rank gets the whole environment"
    meant = _SAME.get(name.replace("_", "-")) or nearest(name, known)
    return f"unknown flag {name}" + (f"; did you mean {meant}?" if meant else "; see horovodrun --help")


def _read_yaml(path: str) -> dict[str, str]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config-file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config-file {path} is not YAML: {error}") from error
    return parse_yaml({} if content is None else content, path)


def parse_yaml(content: Any, source: str) -> dict[str, str]:
    """Turn the content of a configuration file into environment variables; errors name the file as ``source``.

    Raises:
        UsageError: an unknown key (named with the nearest known one) or a wrong value.
    """
    if not isinstance(content, dict):
        raise UsageError(f"{source}: expected sections such as `params:`, received {content!r}")
    known = {s.yaml_path: s for s in SETTINGS if s.yaml_path}
    hide = next(s for s in SETTINGS if s.env == "HOROVOD_LOG_HIDE_TIME")
    known["logging.hide_timestamp"] = replace(hide, inverted=False)  # Horovod's older key
    variables = {}
    for section, keys in content.items():
        if section == "controller":
            if keys not in _ENGINES:
                raise UsageError(f"{source}: controller must be gloo or mpi; received {keys!r}")
            variables[_CONTROLLER] = keys
            continue
        sections = {path.partition(".")[0] for path in known}
        if section not in sections:
            meant = nearest(str(section), [*sections])
            raise UsageError(f"{source}: unknown section {section}" + (f"; did you mean {meant}?" if meant else ""))
        if keys is not None and not isinstance(keys, dict):
            raise UsageError(f"{source}: section {section} must hold `key: value` lines; received {keys!r}")
        for key, value in (keys or {}).items():
            path = f"{section}.{key}"
            if path not in known:
                meant = nearest(path, list(known))
                raise UsageError(f"{source}: unknown key {path}" + (f"; did you mean {meant}?" if meant else ""))
            if isinstance(value, list | dict):
                raise UsageError(f"{source}: {path} must be a single value; received {value!r}")
            if value is not None:
                variables[known[path].env] = _to_variable(known[path], str(value), f"{source}: {path}")
    return variables
