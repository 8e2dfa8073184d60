"""The arguments of ``mpirun`` that have an effect without it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from poprun.flags import CommandLineError

__all__ = ["MpiArguments", "read_arguments"]

# poprun does these anyway.
_DONE_ANYWAY = ("--tag-output", "-tag-output", "--allow-run-as-root", "-allow-run-as-root", "--oversubscribe")
_INTERFACES = ("btl_tcp_if_include", "oob_tcp_if_include")


@dataclass
class MpiArguments:
    """Arguments with an effect, and the ignored ones.

    Attributes:
        environ: variables for the instances.
        networks: interfaces or subnets over which hosts communicate.
        output_dir: folder for the output of each instance, or empty.
        timestamps: whether each line of output begins with date and time.
        ignored: arguments without effect.
    """

    environ: dict[str, str] = field(default_factory=dict)
    networks: list[str] = field(default_factory=list)
    output_dir: str = ""
    timestamps: bool = False
    ignored: list[str] = field(default_factory=list)


def read_arguments(text: str, environ: Mapping[str, str]) -> MpiArguments:
    """Parse arguments of ``mpirun``.

    Args:
        text: the arguments, as on a command line.
        environ: environment variables from which ``-x NAME`` takes its value.

    Raises:
        ValueError: quotes do not match, or a value is missing.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CommandLineError(f"arguments for mpirun: {error} in {text!r}") from None
    found = MpiArguments()
    while words:
        word = words.pop(0)
        if word in ("-x", "--x"):
            name, equals, value = _value(word, words).partition("=")
            if equals:
                found.environ[name] = value
            elif name in environ:
                found.environ[name] = environ[name]
            else:
                found.ignored.append(f"-x {name} (it is not set)")
        elif word in ("--mca", "-mca", "--prtemca"):
            key, value = _value(word, words), _value(word, words)
            if key in _INTERFACES:
                found.networks += [entry for entry in value.split(",") if entry not in found.networks]
            else:
                found.ignored.append(f"{word} {key} {value}")
        elif word in ("--output-filename", "-output-filename", "--output"):
            found.output_dir = _value(word, words).removeprefix("dir=")
        elif word in ("--timestamp-output", "-timestamp-output"):
            found.timestamps = True
        elif word not in _DONE_ANYWAY:
            value = words.pop(0) if words and not words[0].startswith("-") else ""
            found.ignored.append(f"{word} {value}".strip())
    return found


def _value(option: str, words: list[str]) -> str:
    if not words:
        raise CommandLineError(f"arguments for mpirun: {option} needs a value")
    return words.pop(0)
