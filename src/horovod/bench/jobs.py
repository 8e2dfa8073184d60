"""Start ranks of this benchmark through horovodrun, and read their events: marked lines of rank 0's output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["clean_environment", "horovodrun", "parse_event", "run_job", "write_event"]

#: ASCII record separator (RFC 7464): no other output of a job contains it.
_MARK = "\x1e"
_FOREIGN = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "HYDRA_", "TORCHELASTIC_", "SLURM_", "KMP_")
_FOREIGN_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables in which a launcher describes this process's own job."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN)
    }


def horovodrun(ranks: int, argv: Sequence[str], hosts: str = "") -> list[str]:
    """Return the command that runs ``python *argv`` as ``ranks`` ranks under horovodrun, with this interpreter.

    Args:
        ranks: number of ranks.
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


def write_event(event: dict[str, Any]) -> None:
    """Write an event as a marked line, which passes any launcher that forwards output line by line."""
    sys.stdout.write(f"{_MARK}{json.dumps(event)}\n")
    sys.stdout.flush()


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event on ``line``, behind any prefix of a launcher; ``None`` when there is none."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    event: dict[str, Any] = json.loads(text)
    return event
