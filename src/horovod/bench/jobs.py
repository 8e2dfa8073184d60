"""Start ranks of this benchmark through horovodrun, and read their events."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from horovod.bench.events import parse_event
from horovod.bench.mpi_find import clean_environment

__all__ = ["horovodrun", "run_job"]


def horovodrun(ranks: int, argv: Sequence[str], hosts: str = "") -> list[str]:
    """Return the command that runs ``python *argv`` as ``ranks`` ranks under horovodrun, with this interpreter.

    Args:
        ranks: how many.
        argv: the arguments of python.
        hosts: as for ``horovodrun -H``; this host when empty.
    """
    where = ["-H", hosts] if hosts else []
    launcher = "import sys; from horovod.launch.cli import main; sys.exit(main())"
    return [sys.executable, "-c", launcher, "-np", str(ranks), *where, sys.executable, *argv]


def run_job(command: Sequence[str], on_event: Callable[[dict[str, Any]], None]) -> int:
    """Run ``command``; give its events to ``on_event`` and pass its other output on to stderr.

    Args:
        command: the command to start.
        on_event: called with each event.

    Returns:
        The job's exit status.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, errors="replace", env=clean_environment(), stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = parse_event(line)
                if event is None:
                    sys.stderr.write(line)
                else:
                    on_event(event)
            return process.wait()
        except BaseException:
            process.terminate()
            raise
