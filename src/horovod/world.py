"""This process's place in its job: rank, size, host, and the secret that all ranks share.

``detect`` reads the variables that the launcher left in the environment, by the rows of ``launchers``.
Launchers other than horovodrun hand out no secret, so it is derived from data that only processes of the same user
can read: the start-up record of the launcher's daemon on this host.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from horovod.config import JOB_ID, MEETING, RANK_VARIABLES, SECRET_KEY, is_elastic
from horovod.errors import InitError
from horovod.launchers import (
    Launcher,
    aprun_size,
    cross_place,
    find_launcher,
    flux_counts,
    hosts_and_run,
    is_one_per_pod,
    slurm_counts,
)  # fmt: skip
from horovod.phrases import printable

__all__ = [
    "EXITS_VARIABLE", "LOGIN_NODE", "NUMBERS", "ON_HOST", "Meeting", "World", "check_meetings", "detect", "exits_path",
    "export", "is_stopped", "launcher_process", "own_slot", "part_of", "process_status",
]  # fmt: skip

EXITS_VARIABLE = "_HOROVOD_EXITS"
"""Variable with the path of the table of exits of horovodrun's keeper; not a setting."""
ON_HOST = "#on "
"""Separates job and host in the name of the part of a job that runs on one host."""
LOGIN_NODE = (
    "this is a login node of a Cray (aprun is in PATH, and has not started this process), where nothing may run; start "
    "the ranks on compute nodes, from within a batch job: aprun -n 8 -N 4 python train.py"
)
"""Error where ranks may not run."""
NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
"""Fields of ``World`` that change in an elastic job."""
_ONE_MAY_RUN = "One process may run here with HOROVOD_RANK=0 HOROVOD_SIZE=1"
_COUNTED = "the number of processes"
_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):\d{1,5}|ipc://@[\w.-]+")

_checks: list[Callable[[], None]] = []


def check_meetings(*checks: Callable[[], None]) -> None:
    """Have meetings, also one that has begun, call these checks; see ``Meeting.check``."""
    _checks[:] = checks


def _check() -> None:
    for check in _checks[:]:
        check()


@dataclass(frozen=True)
class Meeting:
    """How ranks of several hosts find each other."""

    # "addresses": a service listens at one of `places`; "hosts": rank 0's host, one of `places`, has the service;
    # "mpi": MPI carries the messages; empty: unknown
    kind: str = ""
    places: tuple[str, ...] = ()  # endpoints such as `tcp://10.0.0.1:5000`, or names of hosts
    run: str = ""  # same text on all hosts, another text for any other run; may be empty where each run has its own key
    has_key: bool = False  # whether `World.key` is the same on all hosts
    is_place_known: bool = True  # whether the launcher gives the ranks that share a host
    # the member ranks among MPI's ranks, in the order of their ranks here; all when empty
    members: tuple[int, ...] = ()
    generation: int = 0  # generation of an elastic job; 0 in others
    check: Callable[[], None] = _check  # called while ranks meet; raises an error when that has become useless


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int  # number of this process, from 0
    size: int  # number of processes
    local_rank: int  # number of this process on its host
    local_size: int  # number of processes on this host
    cross_rank: int  # number of this host among those that have this `local_rank`
    cross_size: int  # number of hosts that have this `local_rank`
    hostname: str
    launcher: str  # the launcher of the job, a name of `LAUNCHERS`, or "none"
    # the same text on all ranks of the job on this host, another text for any other job; may be empty for one rank
    job: str
    key: bytes = field(repr=False)  # the job's secret; may be empty for one rank
    meeting: Meeting = field(default=Meeting(), compare=False, repr=False)  # how it finds the ranks of other hosts

    @property
    def is_spread(self) -> bool:
        """Whether there are ranks on other hosts."""
        return self.local_size < self.size


def detect(environ: Mapping[str, str] | None = None, *, proc: Path = Path("/proc"), pid: int | None = None) -> World:
    """Read this process's place in the job.

    Args:
        environ: variables to read; ``os.environ`` when omitted.
        proc: where the process table is mounted.
        pid: the process to describe; this one when omitted.

    Returns:
        The place in the job; size 1 when no launcher is found.

    Raises:
        InitError: a launcher's variables are incomplete or contradict each other, or no secret can be derived.
    """
    environ = os.environ if environ is None else environ
    hostname = printable(environ.get(RANK_VARIABLES["hostname"]) or os.uname().nodename)
    launcher = find_launcher(environ)
    if launcher is None:
        if shutil.which("aprun", path=environ.get("PATH", os.defpath)):
            raise InitError(f"{LOGIN_NODE}. {_ONE_MAY_RUN}")
        if environ.get("PET_NNODES", "1").rpartition(":")[2] != "1":
            raise InitError(
                f"PET_NNODES={environ['PET_NNODES']} says that torchrun starts the ranks on several hosts, and it has "
                f"not started this process, which would train alone: write torchrun train.py. {_ONE_MAY_RUN}"
            )
        return World(0, 1, 0, 1, 0, 1, hostname, "none", "", b"")
    if launcher.name == "horovodrun" and is_elastic(environ):
        return _provisional(launcher, environ, hostname)
    pid = os.getpid() if pid is None else pid
    rank, size = _rank_and_size(launcher, environ, proc, pid)
    local_rank, local_size, is_place_known = _local(launcher, rank, size, environ)
    cross_rank, cross_size = rank // local_size, -(-size // local_size)
    if launcher.name == "horovodrun" and any(RANK_VARIABLES[name] in environ for name in ("cross_rank", "cross_size")):
        cross_rank, cross_size = _pair(RANK_VARIABLES["cross_rank"], RANK_VARIABLES["cross_size"], environ)
    elif launcher.name == "slurm":
        _, node, counts = slurm_counts(size, environ)
        cross_rank, cross_size = cross_place(counts, node, local_rank)
    job, key = _identity(launcher, size, environ, proc, pid)
    meeting = _meeting(launcher, environ, is_place_known)
    return World(
        rank, size, local_rank, local_size, cross_rank, cross_size, hostname, launcher.name, job, key, meeting
    )  # fmt: skip


def _provisional(launcher: Launcher, environ: Mapping[str, str], hostname: str) -> World:
    """Return the place of an elastic job's process before it joins others: its local rank is its slot until then."""
    names = (RANK_VARIABLES["slot"], MEETING, JOB_ID, SECRET_KEY)
    if missing := [name for name in names if not environ.get(name)]:
        raise InitError(
            f"HOROVOD_ELASTIC=1 is set but {', '.join(missing)} not: start the job with horovodrun --min-np"
        )
    counts = {name: environ.get(RANK_VARIABLES[name], "0") for name in ("rank", "size", "slot", "local_size")}
    if wrong := [f"{RANK_VARIABLES[name]}={text!r}" for name, text in counts.items() if not text.isdigit()]:
        raise InitError(f"{wrong[0]} must be a whole number: start the job with horovodrun --min-np, which sets it")
    rank, size, local_rank, local_size = map(int, counts.values())
    meeting = _meeting(launcher, environ, True)
    job, key = _identity(launcher, 2, environ, Path(), 0)
    size, local_size = max(size, rank + 1), max(local_size, local_rank + 1)
    return World(rank, size, local_rank, local_size, 0, 1, hostname, launcher.name, job, key, meeting)


def part_of(world: World, ranks: Sequence[int]) -> World:
    """Return the place of a process in a job of some of the ranks, numbered in the order of the list; all of them in
    their order are the job itself.

    Raises:
        ValueError: this process is not one of them, some do not exist, or srun has numbered the tasks across nodes.
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
    order = os.environ.get("SLURM_DISTRIBUTION", "block") if world.launcher == "slurm" and world.is_spread else "block"
    if not order.startswith("block"):
        raise ValueError(
            f"comm={list(ranks)} needs tasks that srun numbers node by node; received SLURM_DISTRIBUTION={order}; "
            f"start the job with srun --distribution=block, or leave out comm and use process_sets="
        )
    # On several hosts, ranks are assumed to follow each other; on one, launchers may number them in any way.
    first = 0 if world.local_size == world.size else world.rank - world.local_rank
    local = [rank for rank in ranks if first <= rank < first + world.local_size]
    local_rank = local.index(world.rank)
    host_of = [rank // world.local_size for rank in ranks]
    hosts = sorted({host for host in host_of if host_of.count(host) > local_rank})
    return replace(
        world,
        rank=list(ranks).index(world.rank),
        size=len(ranks),
        local_rank=local_rank,
        local_size=len(local),
        cross_rank=hosts.index(world.rank // world.local_size),
        cross_size=len(hosts),
        job=f"{world.job}#{','.join(map(str, ranks))}" if len(ranks) > 1 else "",
        meeting=replace(
            world.meeting,
            run=f"{world.meeting.run}#{','.join(map(str, ranks))}",
            members=tuple(world.meeting.members[rank] for rank in ranks) if world.meeting.members else tuple(ranks),
        ),
    )


def exits_path() -> str:
    """Return the path of the table of exits that horovodrun's keeper lends; empty if there is none."""
    return os.environ.get(EXITS_VARIABLE, "")


def own_slot() -> str:
    """Return this rank's row in the table of exits, as text; empty if unknown."""
    return os.environ.get(RANK_VARIABLES["slot"], "")


def export(world: World) -> None:
    """Write the numbers of this process, which change in an elastic job, to its environment, where scripts, libraries
    and children read them.
    """
    if world.launcher == "horovodrun":  # the variables of other launchers say which process this is
        for name in NUMBERS:
            os.environ[RANK_VARIABLES[name]] = str(getattr(world, name))


def _pair(rank_name: str, size_name: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the values of two variables that only make sense together, checked."""
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


def _rank_and_size(launcher: Launcher, environ: Mapping[str, str], proc: Path, pid: int) -> tuple[int, int]:
    """Return rank and size; if the launcher gives no size, the one given by hand, or from aprun or MPI."""
    if launcher.by_hand is None or launcher.size in environ:
        return _pair(launcher.rank, launcher.size, environ)
    by_hand = launcher.by_hand[0]
    if by_hand in environ:
        return _pair(launcher.rank, by_hand, environ)
    size = _size_by_aprun(launcher, proc, pid) or _size_by_mpi()
    if size > 1 or environ[launcher.rank] == "0":
        return _pair(launcher.rank, _COUNTED, {**environ, _COUNTED: str(size)})
    raise InitError(
        f"{launcher.rank}={environ[launcher.rank]} says which rank this is, but neither {launcher.size} nor MPI how "
        f"many there are; install mpi4py, built with the MPI of this machine, or give every rank {by_hand} and "
        f"{launcher.by_hand[1]} (as with: aprun -n 8 -N 4 -e {by_hand}=8 -e {launcher.by_hand[1]}=4)"
    )


def _size_by_aprun(launcher: Launcher, proc: Path, pid: int) -> int:
    try:
        daemon, _ = launcher_process(launcher.rank, proc, pid)
        words = (proc / str(daemon) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, ValueError, IndexError):
        return 0
    return aprun_size(words)


def _size_by_mpi() -> int:
    try:
        from mpi4py import MPI
    except Exception:  # ImportError, or RuntimeError where there is no MPI library
        return 1
    size: int = MPI.COMM_WORLD.Get_size()
    return size


def _local(launcher: Launcher, rank: int, size: int, environ: Mapping[str, str]) -> tuple[int, int, bool]:
    """Return local rank and size, and whether they are known; a launcher that does not give them counts as one host."""
    if launcher.name == "slurm":
        local_rank, node, counts = slurm_counts(size, environ)
        return local_rank, counts[node], True
    if is_one_per_pod(launcher, environ):
        return 0, 1, True
    if launcher.name == "flux":
        return *flux_counts(rank, size, environ), True
    # A size without its rank may belong to another row; half of the only pair is an error.
    pairs = [pair for pair in launcher.locals if all(name in environ for name in pair)]
    halves = [pair for pair in launcher.locals if any(name in environ for name in pair)]
    for rank_name, size_name in pairs or (halves if launcher.by_hand is None else ()):
        local_rank, local_size = _pair(rank_name, size_name, environ)
        if local_size > size:
            raise InitError(f"{size_name}={local_size} is more than {launcher.size}={size}")
        return local_rank, local_size, True
    if launcher.by_hand is not None and launcher.by_hand[1] in environ:
        # Both launchers fill one host after the other.
        rank_name, size_name = "0", launcher.by_hand[1]
        _, most = _pair(rank_name, size_name, {rank_name: "0", size_name: environ[size_name]})
        return rank % most, min(most, size - rank // most * most), True
    return rank, size, launcher.meeting != "mpi"


def _meeting(launcher: Launcher, environ: Mapping[str, str], is_place_known: bool) -> Meeting:
    """Return how this rank finds the ranks of other hosts."""
    has_key = bool(environ.get(SECRET_KEY))
    if environ.get(MEETING):
        places = tuple(place.strip() for place in environ[MEETING].split(","))
        if wrong := [place for place in places if not _ENDPOINT.fullmatch(place)]:
            raise InitError(
                f"{MEETING} must be tcp://address:port or ipc://@name, several with commas; received {wrong[0]!r}"
            )
        return Meeting("addresses", places, "", has_key, is_place_known)
    if launcher.meeting == "hosts":
        places, run = hosts_and_run(launcher, environ)
        return Meeting("hosts" if places else "", places, run, has_key, is_place_known)
    return Meeting(launcher.meeting, (), "", has_key, is_place_known)


def _identity(launcher: Launcher, size: int, environ: Mapping[str, str], proc: Path, pid: int) -> tuple[str, bytes]:
    """Return name and secret of the job: from the launcher or by hand, else derived from the launcher's daemon."""
    job, key = environ.get(JOB_ID, ""), b""
    if environ.get(SECRET_KEY):
        with suppress(ValueError):
            key = bytes.fromhex(environ[SECRET_KEY])
        if not key:  # only spaces and line ends are an empty key
            raise InitError(f"{SECRET_KEY} must be hexadecimal, such as `openssl rand -hex 32` prints")
    # A job id that an outer horovodrun left behind would be the same for two jobs started inside it.
    own = launcher.name == "horovodrun"
    if size == 1 or (own and job and key):
        return (job if own else ""), key
    named = [environ[name] for name in launcher.job if name in environ]
    is_unique = launcher.is_job_unique and len(named) == len(launcher.job)
    if (key and is_unique) or is_one_per_pod(launcher, environ):
        return "-".join([launcher.name, *named]), key
    try:
        daemon, started = launcher_process(launcher.rank, proc, pid)
        job = "-".join([launcher.name, str(daemon), started, *named])
        if not key:
            auxv = (proc / str(daemon) / "auxv").read_bytes()
            key = hashlib.sha256(auxv + started.encode()).digest() if auxv else b""
    except (OSError, ValueError, IndexError):
        pass
    if is_unique and not key:
        return job or "-".join([launcher.name, *named]), b""  # for rendezvous.vouching: the daemon is another user's
    if not job or not key:
        raise InitError(
            f"this job was started by {launcher.name}, whose process on this host could not be read, so its ranks have "
            f"no secret in common; start it with horovodrun, or export {SECRET_KEY} (hexadecimal, as `openssl rand "
            f"-hex 32` prints) and {JOB_ID} (any word of its own), the same on all ranks"
        )
    return job, key


def launcher_process(variable: str, proc: Path, pid: int) -> tuple[int, str]:
    """Return process id and start time of the nearest ancestor that the launcher did not give a rank.

    A wrapper such as ``bash -c`` inherits the variable that holds the rank, so it is passed over.

    Raises:
        OSError: there is no such ancestor.
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
    # The name may be any bytes.
    return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].decode().split()


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, which lives."""
    try:
        return process_status(Path("/proc"), pid)[0] == "T"
    except (OSError, IndexError):
        return False
