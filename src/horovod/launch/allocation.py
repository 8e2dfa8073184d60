"""Hosts and slots that a scheduler has given to this job, for ``horovodrun`` without ``-H``. Pure.

Sources: salloc(1), sbatch(1) and srun(1) of Slurm; "PBS Professional User's Guide" (PBS_NODEFILE); IBM Spectrum LSF,
"Environment variables set for job execution" and blaunch(1); sge_pe(5) and qrsh(1) of Grid Engine; oarsub(1) and
oarsh(1) of OAR; qsub(1) of Cobalt; Kubeflow's MPI operator, ``/etc/mpi/hostfile`` of MPIJob v2beta1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from horovod.launch.hosts import HostSlots, parse_hostfile, parse_hosts
from horovod.launchers import run_lengths, slurm_hosts

__all__ = ["Allocation", "allocated_slots", "find_allocation", "spread"]

_MPI_JOB_HOSTS = "/etc/mpi/hostfile"
#: Files with a line for each slot: variable -> scheduler, and its substitute for ssh.
_NODE_FILES = {
    "PBS_NODEFILE": ("PBS", ""), "OAR_NODEFILE": ("OAR", "oarsh"), "COBALT_NODEFILE": ("Cobalt", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Allocation:
    """Hosts that a scheduler has given to this job."""

    scheduler: str  # its name
    hosts: tuple[HostSlots, ...]  # the hosts, with one slot for each requested task
    # first words of the command line that runs a program on a host, by host name; other hosts use ssh
    starters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.scheduler}: {','.join(f'{host.name}:{host.slots}' for host in self.hosts)}"


def find_allocation(
    environ: Mapping[str, str], read: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8")
) -> Allocation | None:
    """Return the allocation that this process is in; None where it is in none.

    Raises:
        ValueError: the scheduler's variables or files make no sense.
    """
    for find in (_slurm, _grid_engine, _node_file, _lsf, _mpi_job):
        try:
            found = find(environ, read)
            if found is not None:
                if not found.hosts:
                    raise ValueError(f"{found.scheduler} lists none")
                parse_hosts(",".join(f"{host.name}:{host.slots}" for host in found.hosts))  # refuses what -H refuses
                return found
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot take the hosts from the scheduler: {error}; name them with -H") from error
    return None


def allocated_slots(environ: Mapping[str, str]) -> int:
    """Return the number of slots of the allocation that this process is in; 0 in none.

    Raises:
        ValueError: the scheduler's variables or files make no sense.
    """
    found = find_allocation(environ)
    return sum(host.slots for host in found.hosts) if found is not None else 0


def spread(allocation: Allocation, num_proc: int) -> list[HostSlots]:
    """Return hosts with slots for all ranks: the scheduler's slots or, if these are too few, equal shares."""
    hosts = list(allocation.hosts)
    if num_proc <= sum(host.slots for host in hosts):
        return hosts
    each, more = divmod(num_proc, len(hosts))
    return [HostSlots(host.name, each + (i < more)) for i, host in enumerate(hosts)]


def _slurm(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    if "SLURM_JOB_ID" not in environ or environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return None  # one of several tasks shares the allocation with the others
    hosts: list[HostSlots] = []
    starters: dict[str, tuple[str, ...]] = {}
    size = environ.get("SLURM_HET_SIZE", "0")
    if not size.isdecimal():
        raise ValueError(f"SLURM_HET_SIZE must be a whole number; received {size!r}")
    groups = [f"_HET_GROUP_{i}" for i in range(int(size))] or [""]
    for number, group in enumerate(groups):
        names = slurm_hosts({"SLURM_JOB_NODELIST": environ.get(f"SLURM_JOB_NODELIST{group}", "")})
        cpus = _counts(environ, f"SLURM_JOB_CPUS_PER_NODE{group}", len(names))
        tasks = _counts(environ, f"SLURM_TASKS_PER_NODE{group}", len(names))
        if not len(names) == len(cpus) == len(tasks):
            hidden = " (srun hides them from this step: start the shell with srun --preserve-env --pty)"
            raise ValueError(
                f"Slurm lists {len(names)} nodes in SLURM_JOB_NODELIST{group}, {len(tasks)} in "
                f"SLURM_TASKS_PER_NODE{group}{hidden * ('SLURM_STEP_ID' in environ)} and {len(cpus)} in "
                f"SLURM_JOB_CPUS_PER_NODE{group}"
            )
        for name, slots, cores in zip(names, tasks, cpus, strict=True):
            hosts.append(HostSlots(name, slots))
            starters[name] = (
                "srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={name}",
                f"--cpus-per-task={cores}", "--cpu-bind=none", "--mem=0", "--mpi=none", "--quiet",
                *_gpu_flags(environ.get(f"SLURM_GPUS_PER_TASK{group}", ""), slots),
                *([f"--het-group={number}"] if group else []),
            )  # fmt: skip
    return Allocation("Slurm", _merged(hosts), starters) if hosts else None


def _counts(environ: Mapping[str, str], name: str, nodes: int) -> list[int]:
    try:
        return run_lengths(environ.get(name, f"1(x{nodes})"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _gpu_flags(per_task: str, slots: int) -> list[str]:
    """Return flags that give the only task of a step the GPUs of all tasks of its node, such as ``a100:2`` for each."""
    kind, colon, count = per_task.rpartition(":")
    return [f"--gres=gpu:{kind}{colon}{int(count) * slots}", "--gpu-bind=none"] if count.isdecimal() else []


def _grid_engine(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    if "PE_HOSTFILE" not in environ:
        return None
    lines = [line.split() for line in read(environ["PE_HOSTFILE"]).splitlines() if line.strip()]
    if any(len(line) < 2 or not line[1].isdecimal() for line in lines):
        raise ValueError(f"{environ['PE_HOSTFILE']}: expected lines `host slots queue processors` of Grid Engine")
    hosts = _merged(HostSlots(line[0], int(line[1])) for line in lines)
    return Allocation("Grid Engine", hosts, {host.name: ("qrsh", "-inherit", host.name) for host in hosts})


def _node_file(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    for name, (scheduler, starter) in _NODE_FILES.items():
        if name in environ:
            hosts = _counted(read(environ[name]).split())
            return Allocation(scheduler, hosts, {host.name: (starter, host.name) for host in hosts if starter})
    return None


def _lsf(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    if "LSB_JOBID" not in environ:
        return None
    if environ.get("LSB_DJOB_HOSTFILE"):
        hosts = _counted(read(environ["LSB_DJOB_HOSTFILE"]).split())
    elif environ.get("LSB_MCPU_HOSTS"):
        words = environ["LSB_MCPU_HOSTS"].split()
        if len(words) % 2 or not all(word.isdecimal() for word in words[1::2]):
            raise ValueError(f"expected `host slots ...` in LSB_MCPU_HOSTS, received {' '.join(words)!r}")
        hosts = _merged(HostSlots(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True))
    else:
        hosts = _counted(environ.get("LSB_HOSTS", "").split())
    return Allocation("LSF", hosts, {host.name: ("blaunch", host.name) for host in hosts}) if hosts else None


def _mpi_job(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    if environ.get("K_MPI_JOB_ROLE") != "launcher":
        return None
    return Allocation("MPIJob", tuple(parse_hostfile(read(_MPI_JOB_HOSTS), _MPI_JOB_HOSTS)))


def _counted(names: Sequence[str]) -> tuple[HostSlots, ...]:
    """Return one slot for each time that a host is named."""
    return _merged(HostSlots(name, 1) for name in names)


def _merged(hosts: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(HostSlots(name, count) for name, count in slots.items())
