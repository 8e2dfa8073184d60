"""Programs of this package that run in processes of their own beside the ranks, such as the job service."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from horovod.errors import InitError

__all__ = ["await_answer", "start_program"]

_START_S = 60.0
_started: list[subprocess.Popen[bytes]] = []  # kept, since Python warns of a Popen that is dropped while it runs


def start_program(
    module: str, words: object, stdout: int, stderr: int | None = None, *, keeps_input: bool = False
) -> subprocess.Popen[bytes]:
    """Start the ``main`` of a module as a program. Its standard input is a line of JSON, and stays open after it only
    with ``keeps_input``. Signals to the ranks' process group, such as Ctrl-C, do not reach it.

    Raises:
        InitError: the program does not start.
    """
    path = str(Path(__file__).parents[2])  # a script may have found this package by its own sys.path
    program = f"import sys; sys.path.append({path!r}); from {module} import main; sys.exit(main())"
    command = [sys.executable, "-c", program]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True)
    except OSError as error:
        raise InitError(f"{module} cannot be started: {error}") from error
    assert process.stdin is not None
    process.stdin.write(json.dumps(words).encode() + b"\n")
    if keeps_input:
        process.stdin.flush()
    else:
        process.stdin.close()
    _started.append(process)
    return process


def await_answer(process: subprocess.Popen[bytes]) -> Any:
    """Return the line of JSON that the job service prints.

    Raises:
        InitError: it prints nothing within 60 seconds.
    """
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_S)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise InitError(f"the job service did not start within {_START_S:g} s (exit code {process.poll()})")
    return json.loads(line)
