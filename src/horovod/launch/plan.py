"""Makes the launch plan of a job, without side effects.

A ``LaunchPlan`` holds all decisions: command, environment of each rank, threads of each rank. Making it is pure, so
tables test it; ``supervise`` carries it out.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from horovod.cgroups import usable_cores
from horovod.config import ELASTIC, JOB_ID, MEETING, RANK_VARIABLES, SECRET_KEY
from horovod.launchers import cross_place

__all__ = [
    "FDS_VARIABLE",
    "SCOPE_VARIABLE",
    "Display",
    "LaunchPlan",
    "LaunchRequest",
    "Rotation",
    "Share",
    "elastic_plan",
    "framework_presets",
    "host_variables",
    "make_plan",
    "slot_variables",
    "thread_share",
]

FDS_VARIABLE = "_HOROVOD_TASK_FDS"
"""Descriptors of the call that a rank of ``horovod.run`` makes, and of its result; not a setting."""
SCOPE_VARIABLE = "_HOROVOD_SCOPE"
"""One agent's part of a job, where a host has several agents; not a setting."""
# Reuse freed memory for large results, instead of new pages that the kernel has to clear each time.
_MALLOC_VARIABLES, _KEPT_BYTES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), 1 << 33
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# If we run inside a rank of another launcher, its rank variables would make libraries join the outer job.
# A word that ends in _ is a prefix of variables.
_OUTER_JOBS = {
    "OMPI_COMM_WORLD_RANK": ("OMPI_", "PMIX_", "PRTE_"),
    "PMIX_RANK": ("PMIX_", "PRTE_"),
    "PMI_RANK": ("PMI_", "PMIX_", "HYDI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PALS_RANKID": ("PALS_", "PMI_", "PMIX_"),
    "ALPS_APP_PE": ("ALPS_", "PMI_"),
    "JSM_NAMESPACE_RANK": ("JSM_",),
    "TORCHELASTIC_RUN_ID": (
        "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Share:
    """The ranks of one host."""

    hostname: str
    count: int  # number of ranks
    cores: int  # cores to share among them


@dataclass(frozen=True)
class Rotation:
    """Limits of output files."""

    max_bytes: int = 0  # size of a file, in bytes; 0 for no limit
    backups: int = 1  # number of full files to keep for each


@dataclass(frozen=True)
class LaunchRequest:
    """The user's request, and facts about the machine."""

    command: tuple[str, ...]  # program and arguments of every rank
    num_proc: int  # number of ranks
    environ: Mapping[str, str]  # the launcher's own environment
    job: str = field(default_factory=lambda: secrets.token_hex(16))  # name of the job; a new one when omitted
    # the job's secret, hexadecimal; a new one when omitted
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    hostname: str = field(default_factory=lambda: os.uname().nodename)
    cores: int = field(default_factory=usable_cores)  # cores of this host to share among the ranks
    flags: Mapping[str, str] = field(default_factory=dict)  # variables that command-line flags set; they beat `environ`
    file: Mapping[str, str] = field(default_factory=dict)  # variables that the YAML file sets; `environ` beats them
    output_dir: str = ""  # folder for the output of each rank, or empty
    rotation: Rotation = Rotation()  # limits of the files in it
    timestamps: bool = False  # whether each line of output begins with date and time
    shares: tuple[Share, ...] = ()  # the ranks of each host, in rank order; all on `hostname` when empty
    meeting: tuple[str, ...] = ()  # endpoints where ranks of several hosts meet


@dataclass(frozen=True)
class Display:
    """How a job appears to its user."""

    launcher: str = "horovodrun"  # name of the command that runs the job, for messages
    noun: str = "rank"  # that command's word for a rank
    label: str = "[{rank}]<{stream}>:"  # prefix of each line of output; `{rank}` and `{stream}` are filled in
    is_always: bool = False  # whether a job of one rank has labels, too
    # ranks whose output is not shown, except for the last lines of a rank that fails
    hidden: frozenset[int] = frozenset()
    place: str = "host"  # word for the unit whose loss loses its ranks, such as host
    merges_tracebacks: bool = True  # whether to hold back tracebacks that may end a rank, to show equal ones once


@dataclass(frozen=True)
class LaunchPlan:
    """A complete plan of a job."""

    command: tuple[str, ...]  # program and arguments of every rank
    hostname: str  # host of the ranks; the first one of several
    environ: Mapping[str, str]  # variables of all ranks
    ranks: tuple[Mapping[str, str], ...]  # additional variables of each rank, in rank order
    output_dirs: tuple[str, ...] = ()  # folder for the output of each rank; empty when not wanted
    rotation: Rotation = Rotation()  # limits of the files there
    timestamps: bool = False  # whether each line of output begins with date and time
    notes: tuple[str, ...] = ()  # lines for the user, such as the number of threads
    counts: tuple[int, ...] = ()  # number of ranks of each host, in rank order; empty for one host
    display: Display = Display()  # how the job appears to the user

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.ranks[rank].get(RANK_VARIABLES["hostname"], self.hostname)

    def parts(self) -> list[tuple[int, LaunchPlan]]:
        """Return the first rank of each host, with the host's part of the plan."""
        found, first = [], 0
        for count in self.counts or (self.size,):
            end = first + count
            part = replace(self, hostname=self.host_of(first), ranks=self.ranks[first:end], counts=())
            found.append((first, part))
            first = end
        return found


def make_plan(request: LaunchRequest) -> LaunchPlan:
    """Make the plan of a job.

    Raises:
        ValueError: fewer than one rank.
    """
    if request.num_proc < 1:
        raise ValueError(f"-np (num_proc) must be at least 1; received {request.num_proc}")
    shares = request.shares or (Share(request.hostname, request.num_proc, request.cores),)
    common, environ = _common(request)
    if request.meeting:
        environ[MEETING] = ",".join(request.meeting)
    own: list[dict[str, str]] = []
    notes: list[str] = []
    for share in shares:
        own.append(host_variables(common, share))
        notes += _thread_note(thread_share(common, share.count, share.cores), share, len(shares) > 1)
    if len(shares) == 1:
        environ |= own[0]
        own = [{}]
    counts = [share.count for share in shares]
    ranks = []
    for i, share in enumerate(shares):
        for local_rank in range(share.count):
            ranks.append({**own[i], **rank_variables(share.hostname, counts, i, local_rank)})
    digits = len(str(request.num_proc - 1))
    folders = (f"{request.output_dir}/rank.{rank:0{digits}}" for rank in range(request.num_proc))
    return LaunchPlan(
        command=request.command,
        hostname=shares[0].hostname,
        environ=environ,
        ranks=tuple(ranks),
        output_dirs=tuple(folders) if request.output_dir else (),
        rotation=request.rotation,
        timestamps=request.timestamps,
        notes=tuple(notes),
        counts=tuple(counts) if len(counts) > 1 else (),
    )


def elastic_plan(request: LaunchRequest) -> LaunchPlan:
    """Make the plan that all processes of an elastic job share; the membership places them while the job runs."""
    _, environ = _common(request)
    environ |= {ELASTIC: "1"}
    rotation, timestamps = request.rotation, request.timestamps
    return LaunchPlan(request.command, request.hostname, environ, (), rotation=rotation, timestamps=timestamps)


def _common(request: LaunchRequest) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that the user set, and the environment of all ranks."""
    common = {**request.file, **_cleaned(request.environ), **request.flags}
    return common, {**common, "PYTHONUNBUFFERED": "1", JOB_ID: request.job, SECRET_KEY: request.key}


def host_variables(common: Mapping[str, str], share: Share) -> dict[str, str]:
    """Return the variables of one host's ranks, which divide its cores."""
    threads = thread_share(common, share.count, share.cores)
    host = {**common, **{name: str(count) for name, count in threads.items()}}
    host |= framework_presets(host, share.count, share.cores)
    return {name: text for name, text in host.items() if name not in common}


def slot_variables(hostname: str, number: int, slots: int, rank: int, size: int) -> dict[str, str]:
    """Return the variables of an elastic job's process, on a host with so many slots now. Rank and size hold only until
    it is a member; the rank is 0 only if no rank has a state yet.
    """
    local_size = max(slots, number + 1)
    size = max(size, local_size, rank + 1)
    return _variables(rank, size, number, local_size, 0, 1, hostname)


def thread_share(environ: Mapping[str, str], num_proc: int, cores: int) -> dict[str, int]:
    """Return variables with numbers of threads, so that a host's ranks together use no more cores than exist. Empty for
    a single rank or if the user has decided: the other libraries follow ``OMP_NUM_THREADS``.
    """
    if num_proc == 1 or "OMP_NUM_THREADS" in environ:
        return {}
    share = max(1, cores // num_proc)
    return {name: share for name in THREAD_VARIABLES if name not in environ}


def framework_presets(environ: Mapping[str, str], num_proc: int, cores: int) -> dict[str, str]:
    """Return variables that TensorFlow, JAX and the C library read at their start, for ranks that share a host; those
    of ``environ`` are kept.
    """
    own = environ.get("OMP_NUM_THREADS", "")
    share = int(own) if own.isdecimal() and int(own) else max(1, cores // num_proc)
    # A pool of one thread deadlocks where an operation waits inside of it: a collective, or a callback of JAX.
    pool = str(max(2, share))
    presets = {"TF_CPP_MIN_LOG_LEVEL": "1"}
    if num_proc > 1 or share < 2:
        presets |= {"TF_NUM_INTRAOP_THREADS": str(share), "TF_NUM_INTEROP_THREADS": pool, "NPROC": pool}
    if "GLIBC_TUNABLES" not in environ:
        presets |= dict.fromkeys(_MALLOC_VARIABLES, str(_KEPT_BYTES))
        if share == 1:
            # By default, each further thread gets a heap of at most 64 MiB, and larger blocks go back to the kernel at
            # once: a fifth of a step of JAX, whose programs run on threads of its own, was spent on clearing pages.
            presets["MALLOC_ARENA_MAX"] = "1"
    return {name: text for name, text in presets.items() if name not in environ}


def _thread_note(threads: Mapping[str, int], share: Share, is_one_of_many: bool) -> tuple[str, ...]:
    if not threads:
        return ()
    each = next(iter(threads.values()))
    where = f" of {share.hostname}" if is_one_of_many else ""
    return (
        f"{share.count} ranks share {share.cores} core{'s' * (share.cores != 1)}{where}: OMP_NUM_THREADS={each} and "
        f"the like for each; set OMP_NUM_THREADS to choose",
    )


def _cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of an outer job."""
    outer = [word for sign, words in _OUTER_JOBS.items() if sign in environ for word in words]
    names = {*RANK_VARIABLES.values(), MEETING, ELASTIC, *outer}
    prefixes = tuple(word for word in outer if word.endswith("_"))
    return {k: v for k, v in environ.items() if k not in names and not (prefixes and k.startswith(prefixes))}


def rank_variables(hostname: str, counts: Sequence[int], host: int, local_rank: int) -> dict[str, str]:
    """Return a rank's variables; its cross group has one rank of equal local rank from each host that has one."""
    cross = cross_place(counts, host, local_rank)
    return _variables(sum(counts[:host]) + local_rank, sum(counts), local_rank, counts[host], *cross, hostname)


def _variables(*place: int | str) -> dict[str, str]:
    """Return a process's variables, from their values in the order of the table; its slot is its local rank."""
    return {name: str(value) for name, value in zip(RANK_VARIABLES.values(), (*place, place[2]), strict=True)}
