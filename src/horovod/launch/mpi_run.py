"""``horovodrun --mpi``: finds ``mpirun``, or ``jsrun`` inside LSF, and makes it the one command of a plan."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from horovod.errors import LaunchError
from horovod.files import open_folder
from horovod.launch.flags import Options
from horovod.launch.hosts import HostSlots
from horovod.launch.mpi import MpiLauncher, command_line, recognize
from horovod.launch.plan import LaunchPlan, LaunchRequest, make_plan
from horovod.launch.remote import travels
from horovod.launch.ssh import Access

__all__ = ["has_mpirun", "mpi_plan"]

_VERSION_S = 30.0
# Variables that the launcher sets anew for each process.
_OWN_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "I_MPI_HYDRA_")


def has_mpirun(environ: Mapping[str, str]) -> bool:
    """Return whether there is an ``mpirun`` in an environment's PATH."""
    return _mpirun(environ) is not None


def mpi_plan(
    request: LaunchRequest, options: Options, hosts: Sequence[HostSlots], access: Access, is_one_host: bool = False
) -> LaunchPlan:  # fmt: skip
    """Return a plan whose only process is the launcher of MPI, which starts the ranks.

    Raises:
        LaunchError: there is no ``mpirun``, or it does not run.
        ValueError: the launcher is unknown, or has no flag for a requested option.
    """
    launcher = _find(options.controller, request.environ)
    shares_cores = is_one_host and launcher.kind != "jsrun"  # jsrun runs the ranks elsewhere
    plan = make_plan(request if shares_cores else replace(request, num_proc=1))
    if shares_cores and not hosts:
        hosts = [HostSlots("localhost", request.num_proc)]  # else the launcher counts cores, and refuses more ranks
    names = [name for name in plan.environ if travels(name) and not name.startswith(_OWN_PREFIXES)]
    words = command_line(
        launcher, request.num_proc, hosts, request.command, sorted(names), access,
        mpi_args=options.mpi_args, binding_args=options.binding_args, tcp=options.tcp, is_root=os.geteuid() == 0,
        output_dir=request.output_dir, nodename=os.uname().nodename,
    )  # fmt: skip
    if request.output_dir:
        try:
            os.close(open_folder(Path(request.output_dir)))  # MPICH does not create it
        except OSError as error:
            raise LaunchError(f"--output-filename {request.output_dir}: {error.strerror}") from error
    return replace(plan, command=tuple(words), ranks=({},), output_dirs=(), notes=plan.notes if shares_cores else ())


def _mpirun(environ: Mapping[str, str]) -> str | None:
    path = environ.get("PATH", os.defpath)
    return shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)


def _find(controller: str, environ: Mapping[str, str]) -> MpiLauncher:
    path = environ.get("PATH", os.defpath)
    jsrun = shutil.which("jsrun", path=path)
    if controller == "jsrun" or (jsrun and "LSB_JOBID" in environ):
        if jsrun is None or "LSB_JOBID" not in environ:
            raise LaunchError("jsrun starts ranks only inside a job of LSF, and this is none; submit the job with bsub")
        return MpiLauncher("jsrun", jsrun)
    program = _mpirun(environ)
    if program is None:
        raise LaunchError("--mpi needs mpirun, which is not in PATH; install or load an MPI, or leave --mpi out")
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_VERSION_S, stdin=subprocess.DEVNULL,
            env=dict(environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} --version does not run: {error}") from error
    found = recognize(program, said.stdout + said.stderr)
    if found.kind == "cray" and "PBS_JOBID" not in environ:
        raise LaunchError(
            f"{program} belongs to Cray's PALS, and this is a login node, not a job of PBS: no rank may run here; "
            f"submit the job with qsub"
        )
    return found
