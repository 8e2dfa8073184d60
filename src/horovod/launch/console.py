"""The shell's side of a command that starts ranks: standard files, and the program to run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from horovod.launch.flags import UsageError
from horovod.launch.output import FileSink, OutputSink

__all__ = ["open_standard_files", "own_sinks", "runnable", "with_own_python"]


def with_own_python(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with horovodrun's virtual environment activated, unless another one is active."""
    path = environ.get("PATH", os.defpath)
    own = str(Path(sys.prefix) / "bin")
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in environ and own not in path.split(os.pathsep):
        path = own + os.pathsep + path
    return {**environ, "PATH": path}


def runnable(command: tuple[str, ...], path: str, is_needed: bool) -> tuple[str, ...]:
    """Return the command, with Python in front of a script that is not executable or has no ``#!`` line. Unless
    ``is_needed``, it need not exist on this host; other hosts check it themselves.

    Raises:
        ValueError: the command does not exist, or is not executable.
    """
    name = command[0]
    try:
        found = shutil.which(name, path=path)
        if found and not (name.endswith(".py") and _has_no_interpreter(Path(found))):
            return command
        if name.endswith(".py") and Path(name).is_file():
            return (shutil.which("python", path=path) or sys.executable, *command)
        if found or not is_needed:
            return command
        raise UsageError(f"the command {name!r} {_trouble_with(name, path)}")
    except PermissionError as error:
        raise UsageError(f"the command {name!r} cannot be read: {error.strerror}") from None


def _has_no_interpreter(script: Path) -> bool:
    with script.open("rb") as file:
        return file.read(2) != b"#!"


def _trouble_with(name: str, path: str) -> str:
    if not name:
        return "is empty; say what to run, such as `python train.py`"
    if Path(name).is_dir():
        return "is a folder; say what to run, such as `python train.py`"
    if Path(name).is_file() and os.access(name, os.X_OK):
        return f"was not found in PATH; for the one in this folder write `./{name}`"
    if Path(name).is_file():
        return f"is not executable; `chmod +x {name}`, or if it is a script of Python, `python {name}`"
    if " " in name and shutil.which(name.split()[0], path=path):
        return f"was not found; without quotes around it, it is the command {name.split()[0]!r} with arguments"
    return f"was not found in {Path.cwd()}" if name.endswith(".py") or "/" in name else "was not found in PATH"


def own_sinks() -> tuple[OutputSink, OutputSink]:
    """Return sinks of standard output and error; one sink when both are the same terminal or pipe."""
    out = FileSink(1)
    a, b = os.fstat(1), os.fstat(2)
    return out, out if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) else FileSink(2)


def open_standard_files() -> None:
    """Open closed standard files, else a pipe of ours could get their number and become a child's output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
