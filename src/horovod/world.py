"""Who this process is in its job: rank, size, host, and the secret that its ranks share.

``detect`` reads what the launcher left in the environment; ``LAUNCHERS`` has one row for each launcher we know.
Launchers other than horovodrun hand out no secret, so it is drawn from what only processes of the same user can
read: the start-up record of the launcher's daemon on this host.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from horovod.config import JOB_ID, RANK_VARIABLES, SECRET_KEY
from horovod.errors import InitError
from horovod.phrases import printable

__all__ = ["EXITS_VARIABLE", "LAUNCHERS", "Launcher", "World", "detect", "exits_path", "part_of", "process_status"]


EXITS_VARIABLE = "_HOROVOD_EXITS"
"""Where horovodrun's keeper lends its table of exits; not a setting."""


@dataclass(frozen=True)
class World:
    """This process's place in the job.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        local_rank: number of this process on its host.
        local_size: number of processes on this host.
        cross_rank: number of this host among those that have this ``local_rank``.
        cross_size: number of hosts that have this ``local_rank``.
        hostname: name of this host.
        launcher: who started the job, a name of ``LAUNCHERS``, or "none".
        job: the same text on all ranks of the job on this host, another text for any other job; may be empty
            for one rank.
        key: the job's secret; may be empty for one rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str
    launcher: str
    job: str
    key: bytes

    def __repr__(self) -> str:  # never the key
        return (
            f"World(rank={self.rank}, size={self.size}, local_rank={self.local_rank}, local_size={self.local_size}, "
            f"cross_rank={self.cross_rank}, cross_size={self.cross_size}, hostname={self.hostname!r}, "
            f"launcher={self.launcher!r}, job={self.job!r})"
        )


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
    """

    name: str
    rank: str
    size: str
    locals: tuple[tuple[str, str], ...] = ()
    sign: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "horovodrun",
        RANK_VARIABLES["rank"],
        RANK_VARIABLES["size"],
        ((RANK_VARIABLES["local_rank"], RANK_VARIABLES["local_size"]),),
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
    # MPICH, Intel MPI and their kin; the second pair is Cray's.
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
    ),
    # A batch script has SLURM_PROCID=0 without being a task; only srun sets the number of tasks of a step.
    Launcher(
        "slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        sign=("SLURM_STEP_NUM_TASKS",),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def detect(environ: Mapping[str, str] | None = None, *, proc: Path = Path("/proc"), pid: int | None = None) -> World:
    """Read who this process is.

    Args:
        environ: where to read; ``os.environ`` when omitted.
        proc: where the process table is mounted.
        pid: the process to describe; this one when omitted.

    Returns:
        The place in the job; size 1 when no launcher is found.

    Raises:
        InitError: a launcher's variables are incomplete or contradict each other, or no secret can be drawn.
    """
    environ = os.environ if environ is None else environ
    hostname = printable(environ.get(RANK_VARIABLES["hostname"]) or os.uname().nodename)
    launcher = next((row for row in LAUNCHERS if _is_present(row, environ)), None)
    if launcher is None:
        return World(0, 1, 0, 1, 0, 1, hostname, "none", "", b"")
    rank, size = _pair(launcher.rank, launcher.size, environ)
    local_rank, local_size = _local(launcher, rank, size, environ)
    cross_rank, cross_size = rank // local_size, -(-size // local_size)
    if launcher.name == "horovodrun" and any(RANK_VARIABLES[name] in environ for name in ("cross_rank", "cross_size")):
        cross_rank, cross_size = _pair(RANK_VARIABLES["cross_rank"], RANK_VARIABLES["cross_size"], environ)
    job, key = _identity(launcher, size, environ, proc, os.getpid() if pid is None else pid)
    return World(rank, size, local_rank, local_size, cross_rank, cross_size, hostname, launcher.name, job, key)


def part_of(world: World, ranks: Sequence[int]) -> World:
    """Return the place of a process in a job of some of the ranks, numbered as they are listed.

    Args:
        world: its place among all ranks.
        ranks: those that take part, numbers of ``world``; all of them in their order are the job itself.

    Raises:
        ValueError: this process is not one of them, or they do not exist.
    """
    wrong = [rank for rank in ranks if not 0 <= rank < world.size]
    if wrong or len(set(ranks)) < len(ranks):
        raise ValueError(f"comm={list(ranks)} must name ranks from 0 to {world.size - 1}, each once")
    if world.rank not in ranks:
        raise ValueError(
            f"rank {world.rank} is not in comm={list(ranks)}: only ranks that it names may call init() with it; for "
            f"collectives of a part of a job that all are in, use process_sets="
        )
    if list(ranks) == list(range(world.size)):
        return world
    # On several hosts, ranks are taken to lie one after the other; on one, launchers number them as they like.
    first = 0 if world.local_size == world.size else world.rank - world.local_rank
    local = [rank for rank in ranks if first <= rank < first + world.local_size]
    hosts = sorted({rank // world.local_size for rank in ranks})
    return replace(
        world,
        rank=list(ranks).index(world.rank),
        size=len(ranks),
        local_rank=local.index(world.rank),
        local_size=len(local),
        cross_rank=hosts.index(world.rank // world.local_size),
        cross_size=len(hosts),
        job=f"{world.job}#{','.join(map(str, ranks))}" if len(ranks) > 1 else "",
    )


def exits_path() -> str:
    """Return where horovodrun's keeper lends its table of exits, or nothing."""
    return os.environ.get(EXITS_VARIABLE, "")


def _is_present(row: Launcher, environ: Mapping[str, str]) -> bool:
    if not row.sign:
        return row.rank in environ or row.size in environ
    return any(name in environ for name in row.sign) or (row.rank in environ and row.size in environ)


def _pair(rank_name: str, size_name: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Two variables that only make sense together, checked."""
    missing = [name for name in (rank_name, size_name) if name not in environ]
    if missing:
        there = rank_name if missing == [size_name] else size_name
        said = f"{there}={environ[there]!r} is set but " if there in environ else ""
        raise InitError(
            f"{said}{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not: set both {rank_name} and "
            f"{size_name}, or neither, or start the job with horovodrun"
        )
    numbers = []
    for name in (rank_name, size_name):
        try:
            numbers.append(int(environ[name]))
        except ValueError:
            raise InitError(f"{name} must be a whole number; received {environ[name]!r}") from None
    rank, size = numbers
    if not 0 <= rank < size:
        raise InitError(f"{rank_name}={rank} must be at least 0 and less than {size_name}={size}")
    return rank, size


def _local(launcher: Launcher, rank: int, size: int, environ: Mapping[str, str]) -> tuple[int, int]:
    """Local rank and size; a launcher that does not tell them is taken to use one host."""
    if launcher.name == "slurm":
        return _slurm_local(size, environ)
    for rank_name, size_name in launcher.locals:
        if rank_name in environ or size_name in environ:
            local_rank, local_size = _pair(rank_name, size_name, environ)
            if local_size > size:
                raise InitError(f"{size_name}={local_size} is more than {launcher.size}={size}")
            return local_rank, local_size
    return rank, size


def _slurm_local(size: int, environ: Mapping[str, str]) -> tuple[int, int]:
    """Slurm writes the tasks of each node as ``4(x2),3``."""
    spec = environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))
    try:
        counts: list[int] = []
        for part in spec.split(","):
            count, _, times = part.rstrip(")").partition("(x")
            counts += [int(count)] * int(times or 1)
        return int(environ["SLURM_LOCALID"]), counts[int(environ.get("SLURM_NODEID", "0"))]
    except (ValueError, IndexError, KeyError):
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_LOCALID")
        said = ", ".join(f"{name}={environ.get(name)!r}" for name in names)
        raise InitError(f"cannot tell the local rank under srun from {said}") from None


def _identity(launcher: Launcher, size: int, environ: Mapping[str, str], proc: Path, pid: int) -> tuple[str, bytes]:
    """Name and secret of the job: given by the launcher or by hand, else drawn from the launcher's daemon."""
    job, key = environ.get(JOB_ID, ""), b""
    if environ.get(SECRET_KEY):
        try:
            key = bytes.fromhex(environ[SECRET_KEY])
        except ValueError:
            raise InitError(f"{SECRET_KEY} must be hexadecimal, such as `openssl rand -hex 32` prints") from None
    # A job id that an outer horovodrun left behind would be the same for two jobs started inside it.
    own = launcher.name == "horovodrun"
    if size == 1 or (own and job and key):
        return (job if own else ""), key
    try:
        daemon, started = _daemon(launcher.rank, proc, pid)
        named = [environ[name] for name in launcher.job if name in environ]
        job = "-".join([launcher.name, str(daemon), started, *named])
        if not key:
            auxv = (proc / str(daemon) / "auxv").read_bytes()
            key = hashlib.sha256(auxv + started.encode()).digest() if auxv else b""
    except (OSError, ValueError, IndexError):
        pass
    if not job or not key:
        raise InitError(
            f"this job was started by {launcher.name}, whose process on this host could not be read, so its ranks have "
            f"no secret in common; start it with horovodrun, or export {SECRET_KEY} (hexadecimal, as `openssl rand "
            f"-hex 32` prints) and {JOB_ID} (any word of its own), the same on all ranks"
        )
    return job, key


def _daemon(variable: str, proc: Path, pid: int) -> tuple[int, str]:
    """Process id and start time of the nearest ancestor that the launcher did not give a rank.

    A wrapper such as ``bash -c`` inherits the variable, so it is passed over. Raises OSError at the top of the tree.
    """
    needle = b"\0" + variable.encode() + b"="
    while True:
        pid = int(process_status(proc, pid)[1])
        try:
            environ = (proc / str(pid) / "environ").read_bytes()
        except PermissionError:  # another user's process, so no rank of ours
            environ = b""
        if needle not in b"\0" + environ:
            return pid, process_status(proc, pid)[19]


def process_status(proc: Path, pid: int) -> list[str]:
    """Return the words of ``/proc/<pid>/stat`` from the state on; the name before it may hold blanks and brackets."""
    # That name is bytes, too.
    return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].decode().split()
