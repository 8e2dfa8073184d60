"""Errors for unknown flags: of a later version, of another launcher, or misspelt."""

from __future__ import annotations

import re
from collections.abc import Sequence

from horovod.spelling import nearest

__all__ = ["answer"]

_LATER: dict[str, tuple[str, ...]] = {
    "jobs of several hosts": (
        "--nnodes", "--node-rank", "--prefix", "-prefix",
    ),
}  # fmt: skip
"""Flags of Horovod, and of other launchers, that come with later features."""

_SAME = {
    "-np": (
        "-n", "--n", "-c", "--nproc", "--nprocs", "--nproc-per-node", "-ppn", "--ppn", "-npernode", "--npernode", "-N",
        "--ntasks", "--ntasks-per-node", "--num-processes", "--num-workers",
    ),
    "--reset-limit": ("--max-restarts",),
    "-H": ("--host", "-host", "-hosts"),
    "-hostfile": ("-machinefile", "--machinefile", "-f", "--default-hostfile"),
    "--output-filename": ("--log-dir", "--output-dir", "-outfile-pattern", "--outfile-pattern"),
    "--prefix-output-with-timestamp": ("--timestamp-output", "-timestamp-output"),
    "--config-file": ("--config",),
    "--version": ("-V",),
    "--oversubscribe": ("-oversubscribe", "--overcommit", "-O"),
}  # fmt: skip
"""Flags of mpirun, mpiexec, srun, torchrun and accelerate, by ours that means the same."""

_NOT_NEEDED = {
    "every rank gets the whole environment": ("-x", "-env", "--env", "-genv", "--genv", "-genvall", "--export"),
    "every line of output carries its rank": ("--tag-output", "-tag-output", "-l", "-prepend-rank", "--prepend-rank"),
    "as many processes are started as -np says": ("--use-hwthread-cpus",),
    "the ranks find each other by themselves": (
        "--standalone", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--master-addr",
        "--master-port",
    ),
    "name the program itself, such as python -m module": ("-m", "--module", "--no-python"),
}  # fmt: skip
"""Flags of these launchers that have nothing to say here, by the reason."""


def answer(name: str, known: Sequence[str]) -> str:
    """Return the error for a flag that is not in ``known``: what is right instead, as far as that is sure."""
    word = name.replace("_", "-")  # torchrun takes both
    for feature, flags in _LATER.items():
        if word in flags:
            return f"{name} is for {feature}, which this version cannot run yet"
    for reason, flags in _NOT_NEEDED.items():
        if word in flags:
            return f"{name} is not needed: {reason}"
    glued = re.fullmatch(r"-np?([0-9]+)", word)
    ours = f"-np {glued[1]}" if glued else next((our for our, flags in _SAME.items() if word in flags), "")
    meant = ours or nearest(name, known)
    return f"unknown flag {name}" + (f"; did you mean {meant}?" if meant else "; see horovodrun --help")
