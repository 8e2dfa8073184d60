"""Jobs of other launchers that a rank starts: their environment, and answers as marked lines of their output."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

__all__ = ["clean_environment", "parse_event", "write_event"]

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
