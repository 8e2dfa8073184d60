"""Run a command line as a user would, and never wait for it for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["printed", "run"]


def printed(output: str, label: str = "") -> list[str]:
    """The lines with ``label``, without it; and without the marks ``~~^^`` in tracebacks, which depend on Python."""
    lines = [line.removeprefix(label) for line in output.splitlines() if line.startswith(label)]
    return [line for line in lines if not line.strip() or line.strip("~^ ")]


def run(command: str | list[str], cwd: Path, timeout_s: float = 300.0, **environ: str) -> tuple[int, str]:
    """Run ``command``, in a shell when it is one text, with this interpreter's programs first on the path.

    Args:
        command: what to run.
        cwd: where.
        timeout_s: then it and all it started are killed, in seconds, and the test fails.
        **environ: variables to set besides the present ones.

    Returns:
        The exit code, and standard output and error together.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        executable="/bin/bash" if isinstance(command, str) else None,
        cwd=cwd,
        env={**os.environ, "PATH": path, "COLUMNS": "120", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} did not end within {timeout_s} s; it printed:\n{output}") from None
    return process.returncode, output
