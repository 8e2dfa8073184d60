"""Variables that each launcher sets for the processes that it starts: one row for each launcher.

Sources: mpirun(1) of Open MPI 5, "Environment variables defined for MPI processes"; jsrun(1) of IBM Job Step Manager;
MPICH's wiki, "Using the Hydra Process Manager"; Intel's "MPI Library Developer Reference"; aprun(1) of Cray ALPS, and
S-2529, "Workload Management and Application Placement for the Cray Linux Environment"; mpiexec(1) of HPE Cray PALS, and
Argonne's pages on Polaris and Aurora (docs.alcf.anl.gov); torchrun's page in PyTorch's documentation, "Environment
Variables"; srun(1) of Slurm, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod.config import RANK_VARIABLES
from horovod.errors import InitError

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "aprun_size",
    "is_of_srun",
    "run_lengths",
    "slurm_counts",
    "slurm_hosts",
    "slurm_run",
]


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher.

    Attributes:
        name: what ``World.launcher`` says.
        rank: variable that holds the rank.
        size: variable that holds the number of processes.
        locals: pairs of variables for local rank and local size; the first pair that is there counts.
        sign: the launcher is taken for present when one of these is set; ``rank`` and ``size`` when empty.
        job: variables that tell two jobs of one daemon apart.
        meeting: how ranks of several hosts find each other, as ``world.Meeting.kind``.
        by_hand: variables for size and local size, for a launcher that does not tell them.
        is_job_unique: whether what ``job`` says is the same for no other job of this user's.
        starters: by which words in its command line its process is known that starts all ranks of a host.
    """

    name: str
    rank: str
    size: str
    locals: tuple[tuple[str, str], ...] = ()
    sign: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    meeting: str = "mpi"
    by_hand: tuple[str, str] | None = None
    is_job_unique: bool = False
    starters: tuple[str, ...] = ()


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "horovodrun",
        RANK_VARIABLES["rank"],
        RANK_VARIABLES["size"],
        ((RANK_VARIABLES["local_rank"], RANK_VARIABLES["local_size"]),),
        meeting="",
    ),
    Launcher(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),),
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        (("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),),
        job=("JSM_NAMESPACE_ID",),
    ),
    # Cray: mpiexec of PALS gives these, and its PMI the sizes; aprun of ALPS tells a process its number alone.
    Launcher(
        "pals",
        "PALS_RANKID",
        "PMI_SIZE",
        (
            ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
            ("PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
            ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
        ),
        sign=("PALS_RANKID",),
        job=("PALS_APID",),
        by_hand=(RANK_VARIABLES["size"], RANK_VARIABLES["local_size"]),
    ),
    Launcher(
        "alps",
        "ALPS_APP_PE",
        "PMI_SIZE",
        (("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),),
        sign=("ALPS_APP_PE",),
        job=("ALPS_APP_ID",),
        by_hand=(RANK_VARIABLES["size"], RANK_VARIABLES["local_size"]),
    ),
    # MPICH, Intel MPI and their kin; the second pair is that of Cray's PMI.
    Launcher(
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
    ),
    # RANK alone may mean anything, so torchrun needs one of its own words or the whole pair.
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        (("LOCAL_RANK", "LOCAL_WORLD_SIZE"),),
        sign=("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"),
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        meeting="hosts",
        starters=("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    ),
    # A batch script has SLURM_PROCID=0 without being a task; only srun sets the number of tasks of a step.
    Launcher(
        "slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        sign=("SLURM_STEP_NUM_TASKS",),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        meeting="hosts",
        is_job_unique=True,
        starters=("slurmstepd",),
    ),
)


def is_of_srun(row: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether srun has set a row's variables, as it does with ``--mpi=pmi2`` and ``--mpi=cray_shasta``.

    Where MPI's own launcher runs inside a step, srun has started that launcher's helpers, whose numbers are others.

    Args:
        row: another one than that of Slurm.
        environ: where to read.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    numbers = environ.get(row.rank, ""), environ.get(row.size, tasks)
    return bool(tasks) and numbers == (environ.get("SLURM_PROCID"), tasks)


def slurm_run(environ: Mapping[str, str]) -> str:
    """Return the same text for all tasks of a step, another one for any other step of any cluster, and after a requeue.

    Args:
        environ: where to read.
    """
    named = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    more = [environ[name] for name in ("SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME") if environ.get(name)]
    return "/".join(["slurm", *named, *more])


def aprun_size(command: Sequence[str]) -> int:
    """Return the number of processes that a command line of aprun asks for; 0 when it is none.

    On a Cray aprun runs on another node than the ranks; where something stands in for it, it may be their parent.
    """
    names = [word.rpartition("/")[2] for word in command]
    words = command[names.index("aprun") + 1 :] if "aprun" in names else ()
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        found = re.fullmatch(r"(?:-n|--pes=)(\d+)", flag) or re.fullmatch(r"(?:-n|--pes) (\d+)", f"{flag} {value}")
        if found:
            return int(found[1])
    return 0


def slurm_counts(size: int, environ: Mapping[str, str]) -> tuple[int, int, list[int]]:
    """Return a task's local rank, its node, and how many tasks each node has: Slurm writes ``4(x2),3``.

    Args:
        size: number of tasks, all on one node where nothing else is said.
        environ: where to read.

    Raises:
        InitError: the variables make no sense.
    """
    spec = environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))
    try:
        counts = run_lengths(spec)
        node = int(environ.get("SLURM_NODEID", "0"))
        if not 0 <= int(environ["SLURM_LOCALID"]) < counts[node]:
            raise ValueError(node)
        return int(environ["SLURM_LOCALID"]), node, counts
    except (ValueError, IndexError, KeyError):
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_LOCALID")
        said = ", ".join(f"{name}={environ.get(name)!r}" for name in names)
        raise InitError(f"cannot tell the local rank under srun from {said}") from None


def run_lengths(spec: str) -> list[int]:
    """Return the numbers of a list as Slurm writes it, ``4(x2),3``.

    Args:
        spec: the list.

    Raises:
        ValueError: it is none.
    """
    counts: list[int] = []
    for part in spec.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def slurm_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of a step: Slurm writes ``a[1-3,07]-ib,b``."""
    spec = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", spec)
    return tuple(name for part in parts for name in _expanded(part))


def _expanded(part: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        return [part]
    names = []
    for piece in found[1].split(","):
        first, _, last = piece.partition("-")
        if first.isdigit() and (last or first).isdigit():
            names += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return [f"{part[: found.start()]}{name}{rest}" for name in names for rest in _expanded(part[found.end() :])]
