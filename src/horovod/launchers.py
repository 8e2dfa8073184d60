"""Variables that each launcher sets for the processes that it starts: one row for each launcher.

Sources: mpirun(1) of Open MPI 5, "Environment variables defined for MPI processes"; jsrun(1) of IBM Job Step Manager;
MPICH's wiki, "Using the Hydra Process Manager"; Intel's "MPI Library Developer Reference"; aprun(1) of Cray ALPS, and
S-2529, "Workload Management and Application Placement for the Cray Linux Environment"; mpiexec(1) of HPE Cray PALS, and
Argonne's pages on Polaris and Aurora (docs.alcf.anl.gov); torchrun's page in PyTorch's documentation, "Environment
Variables"; srun(1) of Slurm, "OUTPUT ENVIRONMENT VARIABLES"; flux-environment(7) of Flux; MVAPICH2's user guide;
Kubernetes, "Indexed Job for Parallel Processing with Static Work Assignment" and "DNS for Services and Pods".
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from horovod.config import RANK_VARIABLES
from horovod.errors import InitError

__all__ = [
    "LAUNCHERS", "Launcher", "aprun_size", "cross_place", "find_launcher",
    "first_pod", "flux_counts", "hosts_and_run", "hosts_and_run_of_step", "is_one_per_pod",
    "run_lengths", "slurm_counts", "slurm_hosts",
]  # fmt: skip


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher."""

    name: str  # its name in `World.launcher`
    rank: str  # variable that holds the rank
    size: str  # variable that holds the number of processes
    # pairs of variables for local rank and local size; the first pair that is set counts
    locals: tuple[tuple[str, str], ...] = ()
    # variables, any of which shows that the launcher is present; `rank` and `size` when empty
    sign: tuple[str, ...] = ()
    job: tuple[str, ...] = ()  # variables that tell two jobs of one daemon apart
    meeting: str = "mpi"  # how ranks of several hosts find each other, as `world.Meeting.kind`
    by_hand: tuple[str, str] | None = None  # variables for size and local size, for a launcher that does not set them
    is_job_unique: bool = False  # whether the values of `job` differ between all jobs of this user
    # whether the cluster can prove that processes belong to one user, see `rendezvous.vouching`
    is_vouched: bool = False
    needs_size: bool = False  # whether `rank` alone is not a sign of this launcher
    starters: tuple[str, ...] = ()  # words in the command line of its process that starts all ranks of a host


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
        "mvapich",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        (("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),),
    ),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        (("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),),
        job=("JSM_NAMESPACE_ID",),
    ),
    # Cray: mpiexec of PALS sets these, and its PMI the sizes; aprun of ALPS gives a process only its number.
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
    # Before MPICH: Flux's PMI also sets MPICH's variables.
    Launcher(
        "flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        job=("FLUX_JOB_ID",),
        meeting="hosts",
        is_job_unique=True,
        is_vouched=True,
        starters=("flux-shell",),
    ),
    # MPICH, Intel MPI and their kin; the second pair is that of Cray's PMI.
    Launcher(
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
    ),
    # RANK alone may mean anything, so torchrun needs one of its own variables or the whole pair.
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
        is_vouched=True,
        starters=("slurmstepd",),
    ),
    # An Indexed Job gives each pod its number; the manifest says how many there are. One rank in each.
    Launcher(
        "kubernetes",
        "JOB_COMPLETION_INDEX",
        RANK_VARIABLES["size"],
        meeting="hosts",
        by_hand=(RANK_VARIABLES["size"], RANK_VARIABLES["local_size"]),
        needs_size=True,
    ),
)


#: Launchers that leave variables to programs that their processes start, such as srun.
_MAY_BE_LEFT = ("openmpi", "mvapich", "mpich", "torchrun")


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that has started this process; None where there is none.

    Raises:
        InitError: variables of another launcher are left in the environment of a task of srun.
    """
    found = next((row for row in LAUNCHERS if _is_present(row, environ)), None)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    may_be_left = found is not None and found.name in _MAY_BE_LEFT and "TORCHELASTIC_RUN_ID" not in environ
    if found is not None and may_be_left and environ.get(found.size) == "1" != tasks:
        names = f"{found.rank} and {found.size}"
        raise InitError(
            f"{found.size}=1 says that this process is alone, but srun has started {tasks} tasks; unset {names} if "
            f"they are left from another job, or SLURM_STEP_NUM_TASKS if each task is a job of its own"
        )
    return found


def _is_present(row: Launcher, environ: Mapping[str, str]) -> bool:
    if (
        row.name == "horovodrun"
        and row.rank not in environ
        and any(other.by_hand is not None and other.rank in environ for other in LAUNCHERS)
    ):
        return False  # the size alone: it completes the variables of another launcher
    if row.name in ("mpich", "pals", "torchrun") and _is_of_srun(row, environ):
        return False
    if not (row.sign or row.needs_size):
        return row.rank in environ or row.size in environ
    return any(name in environ for name in row.sign) or (row.rank in environ and row.size in environ)


def _is_of_srun(row: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether srun has set a row's variables, as it does with ``--mpi=pmi2`` and ``--mpi=cray_shasta``.

    Job scripts for PyTorch do the same with RANK. If MPI's own launcher runs inside a step, srun has started that
    launcher's helpers, which have other numbers.
    """
    if "TORCHELASTIC_RUN_ID" in environ and row.name == "torchrun":
        return False
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    numbers = environ.get(row.rank, ""), environ.get(row.size, tasks)
    return bool(tasks) and numbers == (environ.get("SLURM_PROCID"), tasks)


def is_one_per_pod(row: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether each pod of Kubernetes has one rank, for example if an operator sets RANK without torchrun."""
    is_local_known = any(name in environ for pair in row.locals for name in pair)
    return row.name == "kubernetes" or (
        row.name == "torchrun" and "KUBERNETES_SERVICE_HOST" in environ and not is_local_known
    )


def hosts_and_run(
    row: Launcher, environ: Mapping[str, str], full_name: Callable[[], str] | None = None
) -> tuple[tuple[str, ...], str]:
    """Return hosts, one of which is rank 0's, and a text that only the ranks of this run have in common. The launcher
    is one whose ranks meet at a host; ``full_name`` returns the name of this host in DNS.

    Raises:
        InitError: the name of the first pod does not follow from the name of this one.
    """
    if row.name == "slurm":
        named = [environ.get(name, "") for name in row.job]
        more = [environ[name] for name in ("SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME") if environ.get(name)]
        return slurm_hosts(environ), "/".join([row.name, *named, *more])
    if row.name == "kubernetes":
        first = first_pod((full_name or _full_name)(), environ[row.rank])
        return (first,), f"{row.name}/{first}"
    if row.name == "flux":
        return (), f"{row.name}/{environ.get('FLUX_JOB_ID', '')}"
    where = environ.get("MASTER_ADDR", "")
    return ((where,) if where else ()), "/".join(
        [row.name, environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("MASTER_PORT", "")]
    )


def hosts_and_run_of_step(step: str) -> tuple[tuple[str, ...], str]:
    """Return the result of ``hosts_and_run`` for a step of this Slurm job, that of this process when empty, without
    values that added steps do not get.

    Raises:
        InitError: srun has not started this process.
    """
    environ = os.environ
    row = find_launcher(environ)
    if row is None or row.name != "slurm":
        raise InitError("HOROVOD_JOIN_STEP is for processes that srun starts; unset it")
    # Where srun got --jobid, its nodes of the job are only those of the step.
    nodes = environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    given = {name: text for name, text in environ.items() if name != "SLURM_CLUSTER_NAME"}
    given |= {"SLURM_STEP_ID": step, "SLURM_STEP_NODELIST": nodes} if step else {}
    return hosts_and_run(row, given)


def _full_name() -> str:
    """Return the name that ``hostname -f`` prints; kubelet writes it into ``/etc/hosts``."""
    name = socket.gethostname()
    try:
        return socket.getaddrinfo(name, None, flags=socket.AI_CANONNAME)[0][3] or name
    except OSError:
        return name


def first_pod(name: str, index: str) -> str:
    """Return the name of the first pod of an Indexed Job, from that of another one in DNS, such as
    ``train-2.train.default.svc.cluster.local``, and its index.

    Raises:
        InitError: the name of this pod has another form.
    """
    label, dot, rest = name.partition(".")
    if not (dot and label.endswith(f"-{index}")):
        raise InitError(
            f"this pod is called {name!r}; expected <job>-{index}.<service>, by which the pods find each other: create "
            f"a headless Service, and name it in spec.template.spec.subdomain of the Job"
        )
    return f"{label[: -len(index)]}0.{rest}"


def flux_counts(rank: int, size: int, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return a task's number on its node, and the number of tasks of each node.

    Raises:
        InitError: nodes differ in their number of tasks, or tasks are not numbered node by node; Flux sets no more.
    """
    nodes, local = environ.get("FLUX_JOB_NNODES", "1"), environ.get("FLUX_TASK_LOCAL_ID", "")
    each = size // int(nodes) if nodes.isdecimal() and int(nodes) else 0
    if not each or each * int(nodes) != size or str(rank % each) != local:
        raise InitError(
            f"Flux does not tell which tasks share a node: FLUX_JOB_NNODES={nodes!r}, FLUX_TASK_LOCAL_ID={local!r} for "
            f"task {rank} of {size}; ask for the same number on each node (flux run -N 2 --tasks-per-node 4)"
        )
    return rank % each, each


def aprun_size(command: Sequence[str]) -> int:
    """Return the number of processes that a command line of aprun requests; 0 for another command.

    On a Cray, aprun runs on another node than the ranks; a substitute for aprun may be their parent.
    """
    names = [word.rpartition("/")[2] for word in command]
    words = command[names.index("aprun") + 1 :] if "aprun" in names else ()
    for flag, value in zip(words, [*words[1:], ""], strict=False):
        found = re.fullmatch(r"(?:-n|--pes=)(\d+)", flag) or re.fullmatch(r"(?:-n|--pes) (\d+)", f"{flag} {value}")
        if found:
            return int(found[1])
    return 0


def cross_place(counts: Sequence[int], host: int, local_rank: int) -> tuple[int, int]:
    """Return the index of a host among those that have a rank with this local rank, and the number of those; ``counts``
    are the numbers of ranks of all hosts.
    """
    alike = [index for index, count in enumerate(counts) if count > local_rank]
    return alike.index(host), len(alike)


def slurm_counts(size: int, environ: Mapping[str, str]) -> tuple[int, int, list[int]]:
    """Return a task's local rank, its node, and the number of tasks of each node: Slurm writes ``4(x2),3``. They are
    all on one node unless a variable says otherwise. In a heterogeneous step, SLURM_NODEID follows the order of the
    components, and the list of nodes, like that of their tasks, does not.

    Raises:
        InitError: the variables make no sense.
    """
    spec = environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))
    try:
        counts = run_lengths(spec)
        names, name = slurm_hosts(environ), environ.get("SLURMD_NODENAME", "")
        is_listed = name in names and len(names) == len(counts)
        node = names.index(name) if is_listed else int(environ.get("SLURM_NODEID", "0"))
        if not 0 <= int(environ["SLURM_LOCALID"]) < counts[node]:
            raise ValueError(node)
        return int(environ["SLURM_LOCALID"]), node, counts
    except (ValueError, IndexError, KeyError):
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_LOCALID")
        said = ", ".join(f"{name}={environ.get(name)!r}" for name in names)
        raise InitError(f"cannot tell the local rank under srun from {said}") from None


def run_lengths(spec: str) -> list[int]:
    """Return the numbers of a list as Slurm writes it, ``4(x2),3``.

    Raises:
        ValueError: the text is no such list.
    """
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", spec, re.ASCII):
        raise ValueError(f"expected counts as Slurm writes them, 2(x3),1; received {spec!r}")
    parts = (part.rstrip(")").partition("(x") for part in spec.split(","))
    return [int(count) for count, _, times in parts for _ in range(int(times or 1))]


def slurm_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of a step: Slurm writes ``a[1-3,07]-ib,b``; none if it has written something else."""
    spec = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not re.fullmatch(r"([^\[\]\s]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])*", spec, re.ASCII):
        return ()
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", spec)
    return tuple(name for part in parts for name in _expanded(part))


def _expanded(part: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        return [part]
    names = []
    for piece in found[1].split(","):
        first, _, last = piece.partition("-")
        names += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return [f"{part[: found.start()]}{name}{rest}" for name in names for rest in _expanded(part[found.end() :])]
