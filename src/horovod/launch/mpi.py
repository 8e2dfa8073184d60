"""``horovodrun --mpi``: finds ``mpirun``, or ``jsrun`` inside LSF, and makes its command line the one of a plan.

Flags as in the manuals: mpirun(1) of Open MPI 4 and 5, "Using the Hydra Process Manager" of MPICH, Intel's "MPI Library
Developer Reference", mpirun(1) of IBM Spectrum MPI, mpiexec(1) of Cray PALS, jsrun(1) of IBM Job Step Manager.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from horovod.errors import LaunchError
from horovod.files import open_folder
from horovod.launch.flags import Options
from horovod.launch.hosts import HostSlots
from horovod.launch.plan import LaunchPlan, LaunchRequest, make_plan
from horovod.launch.remote import travels
from horovod.launch.ssh import Access

__all__ = ["MpiLauncher", "command_line", "has_mpirun", "mpi_plan", "recognize"]

_VERSION_S = 30.0
# Variables that the launcher sets anew for each process.
_OWN_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "I_MPI_HYDRA_")


@dataclass(frozen=True)
class MpiLauncher:
    """The program that starts the ranks."""

    kind: str  # "openmpi", "spectrum", "mpich", "intel", "cray" or "jsrun"
    program: str  # its name or path
    major: int = 0  # first number of its version; 0 when unknown


def recognize(program: str, version: str) -> MpiLauncher:
    """Recognize an MPI launcher by the output of ``mpirun --version``.

    Raises:
        ValueError: the launcher is unknown.
    """
    words = version.replace(")", " ").split()
    major = next((int(word.split(".")[0]) for word in words if word[0].isdigit() and "." in word), 0)
    for mark, kind in (
        ("IBM Spectrum MPI", "spectrum"),
        ("Open MPI", "openmpi"),
        ("OpenRTE", "openmpi"),
        ("Intel(R) MPI", "intel"),
        ("HYDRA", "mpich"),
        ("MPICH", "mpich"),
        ("PALS", "cray"),
    ):
        if mark in version:
            return MpiLauncher(kind, program, major)
    first = version.strip().partition("\n")[0]
    raise ValueError(
        f"{program} is an unknown mpirun: it prints {first!r}. Known are Open MPI, Spectrum MPI, MPICH, Intel "
        f"MPI and Cray's mpiexec; or start the ranks with another launcher yourself, such as mpirun python train.py"
    )


def command_line(
    launcher: MpiLauncher,
    num_proc: int,
    hosts: Sequence[HostSlots],
    command: Sequence[str],
    variables: Sequence[str],
    access: Access,
    *,
    mpi_args: Sequence[str] = (),
    binding_args: Sequence[str] = (),
    tcp: bool = False,
    is_root: bool = False,
    output_dir: str = "",
    nodename: str = "",
) -> list[str]:
    """Return the command that starts the ranks.

    Args:
        launcher: the program that starts them.
        num_proc: number of ranks.
        hosts: hosts of the ranks; empty leaves the choice to the launcher.
        command: program and arguments of each rank.
        variables: names of environment variables to pass on; no command line shows their values.
        access: port and key of ssh, and the network interfaces to use.
        mpi_args: more flags.
        binding_args: flags that place ranks; they replace ours.
        tcp: whether not to use InfiniBand.
        is_root: whether root starts them, as is usual in containers; Open MPI needs a flag for that.
        output_dir: folder for a copy of each rank's output; some launchers write only there; empty for none.
        nodename: name of this host on other hosts.

    Raises:
        ValueError: the launcher cannot write a file for each rank, or does not accept these host names.
    """
    hosts = _named(launcher, hosts, nodename)
    words = {"openmpi": _open_mpi, "spectrum": _open_mpi, "mpich": _hydra, "intel": _hydra, "cray": _pals}.get(
        launcher.kind, _jsrun
    )(launcher, num_proc, hosts, variables, access, tuple(binding_args), tcp)
    root = ["--allow-run-as-root"] if is_root and launcher.kind in ("openmpi", "spectrum") else []
    return [launcher.program, *root, *words, *_output_words(launcher, output_dir), *mpi_args, *command]


def _named(launcher: MpiLauncher, hosts: Sequence[HostSlots], nodename: str) -> list[HostSlots]:
    """Return the hosts under names that the launcher accepts; it cuts names at the first colon."""
    hosts = [HostSlots("localhost", host.slots) if host.name == "::1" else host for host in hosts]
    if launcher.kind in ("mpich", "intel") and len({host.name for host in hosts}) > 1:
        # The launcher tells other hosts to connect to this name.
        hosts = [HostSlots(nodename or host.name, host.slots) if _is_loopback(host.name) else host for host in hosts]
    if wrong := [host.name for host in hosts if ":" in host.name and launcher.kind not in ("cray", "jsrun")]:
        raise ValueError(
            f"-H [{wrong[0]}]: {launcher.program} takes no addresses of IPv6; give the host a name (in DNS or "
            f"/etc/hosts), or leave --mpi out"
        )
    return list(hosts)


def _is_loopback(name: str) -> bool:
    return name == "localhost" or name.startswith("127.")


def _output_words(launcher: MpiLauncher, folder: str) -> list[str]:
    if not folder:
        return []
    if launcher.kind in ("openmpi", "spectrum"):
        is_prrte = launcher.kind == "openmpi" and launcher.major >= 5
        return ["--output", f"dir={folder}"] if is_prrte else ["--output-filename", folder]
    if launcher.kind in ("mpich", "intel"):
        return ["-outfile-pattern", f"{folder}/rank.%r.stdout", "-errfile-pattern", f"{folder}/rank.%r.stderr"]
    raise ValueError(f"--output-filename: {launcher.program} cannot be asked for a file of each rank; leave it out")


_Words = list[str]


def _open_mpi(
    launcher: MpiLauncher, num_proc: int, hosts: Sequence[HostSlots], variables: Sequence[str], access: Access,
    binding: tuple[str, ...], tcp: bool,
) -> _Words:  # fmt: skip
    is_prrte = launcher.kind == "openmpi" and launcher.major >= 5
    words = ["-np", str(num_proc)]
    if hosts:
        words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    words += binding or ("--bind-to", "none", "--map-by", "slot")
    if launcher.kind == "spectrum":
        words += ["-tcp"] if tcp else []
    elif tcp:
        words += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
    runtime = "--prtemca" if is_prrte else "--mca"
    if shell := " ".join(access.flags):
        words += [runtime, "plm_ssh_args" if is_prrte else "plm_rsh_args", shell]
    if access.interfaces:
        names = ",".join(access.interfaces)
        words += ["--mca", "btl_tcp_if_include", names]
        words += [runtime, "prte_if_include" if is_prrte else "oob_tcp_if_include", names]
    for name in variables:
        words += ["-x", name]
    return words


def _hydra(
    launcher: MpiLauncher, num_proc: int, hosts: Sequence[HostSlots], variables: Sequence[str], access: Access,
    binding: tuple[str, ...], tcp: bool,
) -> _Words:  # fmt: skip
    words = ["-np", str(num_proc)]
    if hosts:
        words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    words += binding or (() if launcher.kind == "intel" else ("-bind-to", "none"))
    if access.interfaces:
        words += ["-iface", access.interfaces[0]]
    if tcp and launcher.kind == "intel":
        words += ["-genv", "FI_PROVIDER", "tcp"]
    return [*words, "-genvlist", ",".join(variables)] if variables else words


def _pals(
    launcher: MpiLauncher, num_proc: int, hosts: Sequence[HostSlots], variables: Sequence[str], access: Access,
    binding: tuple[str, ...], tcp: bool,
) -> _Words:  # fmt: skip
    words = ["-n", str(num_proc)]
    if hosts:
        words += ["--hosts", ",".join(host.name for host in hosts), "--ppn", str(max(host.slots for host in hosts))]
    words += binding or ("--cpu-bind", "none")
    return [*words, "--envlist", ",".join(variables)] if variables else words


def _jsrun(
    launcher: MpiLauncher, num_proc: int, hosts: Sequence[HostSlots], variables: Sequence[str], access: Access,
    binding: tuple[str, ...], tcp: bool,
) -> _Words:  # fmt: skip
    # jsrun passes on the whole environment, and LSF has chosen the hosts.
    words = ["--nrs", str(num_proc), "--tasks_per_rs", "1"]
    return [*words, *(binding or ("--bind", "none"))]


def has_mpirun(environ: Mapping[str, str]) -> bool:
    """Return whether there is an ``mpirun`` in an environment's PATH."""
    return _mpirun(environ) is not None


def mpi_plan(
    request: LaunchRequest, options: Options, hosts: Sequence[HostSlots], access: Access, is_one_host: bool
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
