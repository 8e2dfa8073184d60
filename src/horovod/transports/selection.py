"""Chooses the engine that moves data between hosts, from the settings, the launcher and the installed engines. Pure.

An explicit setting decides; else MPI where mpirun started the ranks, else Gloo. Inside a host it is always shared
memory, unless a job on one host asks for an engine by name.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from horovod.config import Config
from horovod.errors import InitError

__all__ = ["Choice", "choose", "installed", "wants_nccl"]

#: Launchers whose ranks are processes of MPI.
_MPI_LAUNCHERS = ("openmpi", "mvapich", "mpich", "alps", "pals", "jsrun")
#: Engine -> the module that it comes with, and the package to install.
_NEEDS = {"gloo": ("torch", "torch"), "nccl": ("torch", "torch"), "mpi": ("mpi4py", "khorovod[mpi]")}


class Choice(NamedTuple):
    """The engine that moves data between hosts."""

    engine: str  # "gloo" or "mpi"
    is_hierarchical: bool  # whether shared memory is used inside hosts
    why: str  # the reason, in words
    device_engine: str  # the engine for tensors of a device; it moves them in host memory, too

    def __str__(self) -> str:
        inside = ", with shared memory inside hosts" if self.is_hierarchical else ""
        devices = f"; those of a GPU over {self.device_engine}" if self.device_engine != self.engine else ""
        return f"tensors move over {self.engine} ({self.why}){inside}{devices}"


def installed() -> frozenset[str]:
    """Return the engines that are installed here; load none."""
    return frozenset(engine for engine, (module, _) in _NEEDS.items() if importlib.util.find_spec(module) is not None)


def choose(settings: Config, launcher: str, several_hosts: bool, there: frozenset[str]) -> Choice | None:
    """Return the engine between hosts; None if all data moves through shared memory. ``there`` are the installed
    engines.

    Raises:
        InitError: the chosen engine is not installed.
    """
    asked = settings.cpu_operations
    if not several_hosts:
        if not asked:
            return None
        engine = _checked(asked, there, f"HOROVOD_CPU_OPERATIONS={asked}")
        return Choice(engine, False, "HOROVOD_CPU_OPERATIONS", _for_devices(engine, settings, there))
    engine, why = _engine(settings, launcher, there)
    return Choice(engine, settings.hierarchical_allreduce, why, _for_devices(engine, settings, there))


def wants_nccl(settings: Config, there: frozenset[str]) -> bool:
    """Return whether NCCL moves tensors of a GPU where they are, inside a host as well as between hosts.

    Raises:
        InitError: NCCL is wanted, but torch is not installed.
    """
    return settings.gpu_operations == "nccl" and bool(_checked("nccl", there, "HOROVOD_GPU_OPERATIONS=NCCL"))


def _for_devices(engine: str, settings: Config, there: frozenset[str]) -> str:
    asked = settings.gpu_operations
    if asked in ("", "nccl"):
        return engine  # tensors that NCCL does not take are in host memory, like all others
    return _checked(asked, there, f"HOROVOD_GPU_OPERATIONS={asked}")


def _engine(settings: Config, launcher: str, there: frozenset[str]) -> tuple[str, str]:
    """Return the engine between hosts, and the reason."""
    asked = settings.cpu_operations
    for name, engine in (("HOROVOD_CPU_OPERATIONS", asked), ("HOROVOD_CONTROLLER", settings.controller)):
        if engine:
            return _checked(engine, there, f"{name}={engine}"), name
    if launcher in _MPI_LAUNCHERS and "mpi" in there:
        return "mpi", "mpirun started the ranks"
    if "gloo" in there:
        return "gloo", "the default"
    wanted = "pip install 'khorovod[mpi]'" if launcher in _MPI_LAUNCHERS else "pip install torch"
    other = "torch, for Gloo" if launcher in _MPI_LAUNCHERS else "khorovod[mpi], and start the job with mpirun"
    raise InitError(
        f"ranks on several hosts need an engine between hosts, and there is neither torch (for Gloo) nor mpi4py: "
        f"{wanted} on all hosts; or {other}"
    )


def _checked(engine: str, there: frozenset[str], said: str) -> str:
    if engine not in there:
        module, name = _NEEDS[engine]
        raise InitError(f"{said} needs {module}, which is not installed here: pip install '{name}' on all hosts")
    return engine
