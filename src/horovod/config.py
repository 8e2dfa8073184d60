"""Every setting of the package, in one table.

``Config`` is the table: each field carries its ``Setting`` (variable, flag, unit, help). The command-line flags
of ``horovodrun``, the YAML file and ``docs/environment.md`` are made from it, and no other module reads
``HOROVOD_*`` from the environment (``world`` reads this process's place through the names below). Precedence:
an explicit argument, then a flag, then the environment, then the YAML file, then the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from horovod.phrases import nearest

__all__ = [
    "ELASTIC",
    "INERT",
    "JOB_ID",
    "MEETING",
    "RANK_VARIABLES",
    "SECRET_KEY",
    "SETTINGS",
    "Config",
    "Setting",
    "doubtful_variables",
    "is_elastic",
    "load",
    "openmp_threads",
    "parse",
    "render",
]

Value = bool | int | float | str
MIB = 1 << 20

RANK_VARIABLES = {
    "rank": "HOROVOD_RANK",
    "size": "HOROVOD_SIZE",
    "local_rank": "HOROVOD_LOCAL_RANK",
    "local_size": "HOROVOD_LOCAL_SIZE",
    "cross_rank": "HOROVOD_CROSS_RANK",
    "cross_size": "HOROVOD_CROSS_SIZE",
    "hostname": "HOROVOD_HOSTNAME",
    "slot": "HOROVOD_SLOT",
}
"""Place of a rank; set by horovodrun, read by ``world.detect``. Elastic jobs renew all but host and slot."""
JOB_ID = "HOROVOD_JOB_ID"
"""One job on this host; set by horovodrun, or by hand where no launcher can be found."""
SECRET_KEY = "HOROVOD_SECRET_KEY"
"""The job's key in hexadecimal; set by horovodrun, or by hand where no launcher can be found."""
MEETING = "HOROVOD_MEETING"
"""Where the hosts of a job meet: ``tcp://address:port``, several with commas; set by horovodrun, or by hand."""
ELASTIC = "HOROVOD_ELASTIC"
"""Whether the job may change its size; set by horovodrun."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    env: str  # the environment variable
    default: Value  # value of an unset variable; its type is the type of the setting
    help: str  # one sentence for `--help` and the docs
    name: str = ""  # the field of `Config`; empty for settings without effect
    unit: str = ""  # unit of the environment variable
    flag: str = ""  # flag of horovodrun, or empty
    flag_off: str = ""  # flag that switches it off, for booleans
    yaml_path: str = ""  # `section.key` in the YAML file of `--config-file`, or empty
    scale: int = 1  # the variable is this many times the value of flag and YAML key
    inverted: bool = False  # flag and YAML key have the opposite meaning of the variable
    choices: tuple[str, ...] = ()  # the allowed texts, lower case; empty for any
    minimum: float | None = 0  # least number allowed
    maximum: float | None = None  # greatest number allowed
    in_effect: bool = True  # whether it has any effect in this version


def _setting(env: str, default: Value, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(env, default, help, **more)})


@dataclass(frozen=True)
class Config:
    """All settings of one process, parsed and checked; ``load`` makes it."""

    fusion_threshold_bytes: int = _setting(
        "HOROVOD_FUSION_THRESHOLD", 128 * MIB, "Ready tensors are sent together up to this size; 0 = each alone.",
        unit="bytes", flag="--fusion-threshold-mb", yaml_path="params.fusion_threshold_mb", scale=MIB,
    )  # fmt: skip
    cache_capacity: int = _setting(
        "HOROVOD_CACHE_CAPACITY", 1024,
        "Request signatures that each rank remembers; 0 = none, and every call goes through the coordinator.",
        unit="entries", flag="--cache-capacity", yaml_path="params.cache_capacity",
    )  # fmt: skip
    bucket_bytes: int = _setting(
        "HOROVOD_BUCKET_BYTES", 8 * MIB, "Size of a gradient bucket of DistributedOptimizer.",
        unit="bytes", minimum=1,
    )  # fmt: skip
    arena_bytes: int = _setting(
        "HOROVOD_ARENA_BYTES", 0,
        "Address space that each rank reserves for shared tensors; 0 = physical memory, or the rest below `ulimit -v`.",
        unit="bytes",
    )  # fmt: skip
    start_timeout_s: float = _setting(
        "HOROVOD_START_TIMEOUT", 600.0, "How long init() waits for the other ranks, and horovodrun for other hosts.",
        unit="seconds", flag="--start-timeout",
    )  # fmt: skip
    spark_start_timeout_s: float = _setting(
        "HOROVOD_SPARK_START_TIMEOUT", 600.0, "How long horovod.spark waits for Spark to start all tasks.",
        unit="seconds",
    )  # fmt: skip
    host_timeout_s: float = _setting(
        "HOROVOD_HOST_TIMEOUT", 10.0, "All ranks raise PeerLostError within this time when a host has fallen silent.",
        unit="seconds", minimum=1,
    )  # fmt: skip
    stall_check_disable: bool = _setting(
        "HOROVOD_STALL_CHECK_DISABLE", False, "Neither warn nor stop when ranks do not submit the same tensors.",
        flag="--stall-check", flag_off="--no-stall-check", yaml_path="stall_check.enabled", inverted=True,
    )  # fmt: skip
    stall_warn_s: float = _setting(
        "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0, "Warn when a tensor waits this long for other ranks; 0 = never.",
        unit="seconds", flag="--stall-check-warning-time-seconds", yaml_path="stall_check.warning_time_seconds",
    )  # fmt: skip
    stall_shutdown_s: float = _setting(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0, "Raise on every rank when a tensor waits this long; 0 = never.",
        unit="seconds", flag="--stall-check-shutdown-time-seconds", yaml_path="stall_check.shutdown_time_seconds",
    )  # fmt: skip
    deadlock_s: float = _setting(
        "HOROVOD_DEADLOCK_CHECK_TIME_SECONDS", 10.0,
        "Raise on every rank when ranks provably wait for each other this long, or for one of the two times above if "
        "that is less; 0 = never.", unit="seconds",
    )  # fmt: skip
    timeline: str = _setting(
        "HOROVOD_TIMELINE", "", "File for a trace of all operations of all ranks; written by rank 0.",
        flag="--timeline-filename", yaml_path="timeline.filename",
    )  # fmt: skip
    timeline_mark_cycles: bool = _setting(
        "HOROVOD_TIMELINE_MARK_CYCLES", False, "Mark each execution in the trace, across all its rows.",
        flag="--timeline-mark-cycles", flag_off="--no-timeline-mark-cycles", yaml_path="timeline.mark_cycles",
    )  # fmt: skip
    metrics_filename: str = _setting(
        "HOROVOD_METRICS_FILENAME", "", "Numbers of each rank as OpenMetrics: job.prom becomes job.<rank>.prom.",
        flag="--metrics-filename", yaml_path="metrics.filename",
    )  # fmt: skip
    metrics_interval_s: float = _setting(
        "HOROVOD_METRICS_INTERVAL", 15.0, "How often this file is written.",
        unit="seconds", flag="--metrics-interval", yaml_path="metrics.interval", minimum=0.1,
    )  # fmt: skip
    metrics_port: int = _setting(
        "HOROVOD_METRICS_PORT", 0, "Port for the same numbers, plus the local rank: /metrics over HTTP; 0 = none.",
        flag="--metrics-port", yaml_path="metrics.port", maximum=65535,
    )  # fmt: skip
    metrics_address: str = _setting(
        "HOROVOD_METRICS_ADDRESS", "127.0.0.1", "Address at which that port is open.", flag="--metrics-address",
    )  # fmt: skip
    log_level: str = _setting(
        "HOROVOD_LOG_LEVEL", "warning", "Least severe message that is logged.",
        flag="--log-level", yaml_path="logging.level", choices=LOG_LEVELS,
    )  # fmt: skip
    log_hide_time: bool = _setting(
        "HOROVOD_LOG_HIDE_TIME", False, "Log without date and time.",
        flag="--log-with-timestamp", flag_off="--log-without-timestamp", yaml_path="logging.with_timestamp",
        inverted=True,
    )  # fmt: skip
    flight_recorder_dir: str = _setting(
        "HOROVOD_FLIGHT_RECORDER_DIR", "", "Folder for the last operations of each rank after a stall or a failure.",
    )  # fmt: skip
    controller: str = _setting(
        "HOROVOD_CONTROLLER", "", "Engine between hosts, where HOROVOD_CPU_OPERATIONS names none: MPI or GLOO; set by "
        "--mpi and --gloo.", choices=("", "mpi", "gloo"),
    )  # fmt: skip
    cpu_operations: str = _setting(
        "HOROVOD_CPU_OPERATIONS", "",
        "Engine between hosts: MPI or GLOO; by default MPI where mpirun started the ranks, else Gloo. On one host, it "
        "replaces shared memory.", choices=("", "mpi", "gloo"),
    )  # fmt: skip
    gpu_operations: str = _setting(
        "HOROVOD_GPU_OPERATIONS", "",
        "Engine for tensors of a GPU: NCCL, in GPU memory, also inside hosts; MPI or GLOO between hosts, through host "
        "memory; by default the engine of all other tensors.",
        choices=("", "nccl", "mpi", "gloo"),
    )  # fmt: skip
    hierarchical_allreduce: bool = _setting(
        "HOROVOD_HIERARCHICAL_ALLREDUCE", True,
        "Reduce inside each host first, then between hosts; 0 = between all ranks at once.",
        flag="--hierarchical-allreduce", flag_off="--no-hierarchical-allreduce",
        yaml_path="params.hierarchical_allreduce",
    )  # fmt: skip
    gloo_iface: str = _setting(
        "HOROVOD_GLOO_IFACE", "",
        "Network interface for Gloo and the meeting, or a list a,b to try; by default the one that leads to rank 0.",
    )  # fmt: skip
    gloo_timeout_s: float = _setting(
        "HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0, "How long Gloo waits for a rank, in the middle of an operation too.",
        unit="seconds", flag="--gloo-timeout-seconds", yaml_path="library_options.gloo_timeout_seconds", minimum=0.001,
    )  # fmt: skip
    mpi_threads_disable: bool = _setting(
        "HOROVOD_MPI_THREADS_DISABLE", False, "Ask MPI for no support of threads; then MPI cannot move data here.",
        flag="--mpi-threads-disable", flag_off="--no-mpi-threads-disable",
        yaml_path="library_options.mpi_threads_disable",
    )  # fmt: skip
    elastic: bool = _setting(
        ELASTIC, False, "The job may change its size; set by horovodrun, and by users of srun and torchrun."
    )
    min_np: int = _setting(
        "HOROVOD_MIN_NP", 1, "Fewest ranks of an elastic job under srun or torchrun; horovodrun has --min-np.",
        minimum=1,
    )  # fmt: skip
    join_step: str = _setting(
        "HOROVOD_JOIN_STEP", "", "Number of the step of Slurm whose elastic job this process joins, such as 0.",
    )  # fmt: skip
    elastic_timeout_s: float = _setting(
        "HOROVOD_ELASTIC_TIMEOUT", 600.0, "How long the ranks of an elastic job wait for each other after a change.",
        unit="seconds", flag="--elastic-timeout",
    )  # fmt: skip
    checkpoint_dir: str = _setting(
        "HOROVOD_CHECKPOINT_DIR", "", "Folder for the state of an elastic job that ends with too few ranks.",
        flag="--checkpoint-dir",
    )  # fmt: skip
    dynamic_process_sets: bool = _setting(
        "HOROVOD_DYNAMIC_PROCESS_SETS", False, "Process sets may always be added and removed.", in_effect=False,
    )  # fmt: skip

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The names in ``gloo_iface``; empty for all interfaces."""
        return tuple(name.strip() for name in self.gloo_iface.split(",") if name.strip())


def _inert(env: str, default: Value, help: str, flag: str = "", yaml_path: str = "", **more: Any) -> Setting:
    off = flag.replace("--", "--no-", 1) if flag and isinstance(default, bool) else ""
    return Setting(env, default, help, flag=flag, flag_off=off, yaml_path=yaml_path, in_effect=False, **more)


INERT: tuple[Setting, ...] = (
    _inert("HOROVOD_CYCLE_TIME", 1.0, "The engine waits for events, not for cycles.",
           "--cycle-time-ms", "params.cycle_time_ms"),
    _inert("HOROVOD_HIERARCHICAL_ALLGATHER", False, "HOROVOD_HIERARCHICAL_ALLREDUCE holds for all collectives.",
           "--hierarchical-allgather", "params.hierarchical_allgather"),
    _inert("HOROVOD_TORUS_ALLREDUCE", False, "NCCL chooses the way between GPUs.",
           "--torus-allreduce", "params.torus_allreduce"),
    _inert("HOROVOD_AUTOTUNE", False, "There is no autotuner.", "--autotune", "autotune.enabled"),
    _inert("HOROVOD_AUTOTUNE_LOG", "", "See HOROVOD_AUTOTUNE.", "--autotune-log-file", "autotune.log_file"),
    _inert("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3, "See HOROVOD_AUTOTUNE.",
           "--autotune-warmup-samples", "autotune.warmup_samples"),
    _inert("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10, "See HOROVOD_AUTOTUNE.",
           "--autotune-steps-per-sample", "autotune.steps_per_sample"),
    _inert("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20, "See HOROVOD_AUTOTUNE.",
           "--autotune-bayes-opt-max-samples", "autotune.bayes_opt_max_samples"),
    _inert("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", 0.8, "See HOROVOD_AUTOTUNE.",
           "--autotune-gaussian-process-noise", "autotune.gaussian_process_noise", maximum=1),
    _inert("HOROVOD_NUM_NCCL_STREAMS", 1, "NCCL has one stream on each GPU.",
           "--num-nccl-streams", "library_options.num_nccl_streams"),
    _inert("HOROVOD_THREAD_AFFINITY", "", "Threads of this package are not bound to a core.",
           "--thread-affinity", "library_options.thread_affinity"),
    _inert("HOROVOD_BATCH_D2D_MEMCOPIES", True, "Tensors of a GPU are not copied into a buffer before NCCL."),
    _inert("HOROVOD_DISABLE_GROUP_FUSION", False, "A group is one operation, which may be fused with others."),
    _inert("HOROVOD_ENABLE_ASYNC_COMPLETION", False, "A result on a GPU is complete when its operation is done."),
    _inert("HOROVOD_ENABLE_XLA_OPS", False, "Collectives in programs that XLA compiles always work."),
    _inert("HOROVOD_ADASUM_MPI_CHUNK_SIZE", 1 << 30, "Adasum has chunks of a fixed size."),
    _inert("HOROVOD_DISABLE_NVTX_RANGES", False, "There are no NVTX ranges."),
    _inert("HOROVOD_POPART_BROADCAST_TIMEOUT", 0.0, "See HOROVOD_STALL_SHUTDOWN_TIME_SECONDS."),
)  # fmt: skip
"""Settings of Horovod that scripts and job files still carry: accepted, checked, without effect."""

SETTINGS: tuple[Setting, ...] = tuple(replace(f.metadata["setting"], name=f.name) for f in fields(Config)) + INERT
"""The whole table."""

# Horovod's build, its tests and its Spark and Ray parts read these; they mean nothing here and are not typing mistakes.
_FOREIGN_PREFIXES = (
    "HOROVOD_WITH_", "HOROVOD_WITHOUT_", "HOROVOD_GPU", "HOROVOD_CUDA_", "HOROVOD_ROCM_", "HOROVOD_NCCL_",
    "HOROVOD_NVTX_", "HOROVOD_BUILD_", "HOROVOD_ALLOW_", "HOROVOD_CMAKE", "HOROVOD_DEBUG", "HOROVOD_SKIP_",
    "HOROVOD_LOCAL_VERSION", "HOROVOD_MPICXX", "HOROVOD_CCL_", "HOROVOD_SPARK_", "HOROVOD_TEST_", "HOROVOD_HOME",
    "HOROVOD_MIXED_INSTALL", "HOROVOD_GLOO_RENDEZVOUS_", "HOROVOD_CONTROLLER_", "HOROVOD_CPU_OPERATIONS_",
)  # fmt: skip


def parse(setting: Setting, text: str, source: str = "") -> Value:
    """Read the text of an environment variable; ``source`` is its name in an error, if not the variable.

    Raises:
        ValueError: not a value of that type, not a choice, or out of range; names ``source``.
    """
    where, word = source or setting.env, text.strip()
    if isinstance(setting.default, bool):
        if word.lower() not in _TRUE + _FALSE:
            raise ValueError(f"{where} must be one of 1/true/yes/on or 0/false/no/off; received {text!r}")
        return word.lower() in _TRUE
    if isinstance(setting.default, str):
        if setting.choices and word.lower() not in setting.choices:
            raise ValueError(f"{where} must be one of {', '.join(filter(None, setting.choices))}; received {text!r}")
        return word.lower() if setting.choices else text
    kind = type(setting.default)
    wanted = "a whole number" if kind is int else "a number"
    try:
        value = kind(word)
    except ValueError:
        raise ValueError(f"{where} must be {wanted}; received {text!r}") from None
    if not (setting.minimum is None or value >= setting.minimum) or value == float("inf"):
        raise ValueError(f"{where} must be {wanted} of at least {setting.minimum:g}; received {text!r}")
    if setting.maximum is not None and value > setting.maximum:
        raise ValueError(f"{where} must be {wanted} of at most {setting.maximum:g}; received {text!r}")
    return value


def render(value: Value) -> str:
    """Write a value as the text of an environment variable, so that ``parse`` reads it back."""
    if isinstance(value, bool):
        return str(int(value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def load(environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
    """Read all settings of this process.

    Args:
        environ: variables to read; ``os.environ`` when omitted.
        **overrides: explicit values by field name; they win. ``None`` means not given.

    Returns:
        The settings, parsed and checked.

    Raises:
        ValueError: a variable holds no value of its type; the message names it.
        TypeError: an override is not a field of ``Config``.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.env in environ:
            value = parse(setting, environ[setting.env])
            if setting.name:
                values[setting.name] = value
    values.update({name: value for name, value in overrides.items() if value is not None})
    return Config(**values)


def is_elastic(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether HOROVOD_ELASTIC is set, without a look at the other settings.

    Args:
        environ: variables to read; ``os.environ`` when omitted.

    Raises:
        ValueError: its value is not a boolean.
    """
    setting = next(s for s in SETTINGS if s.name == "elastic")
    text = (os.environ if environ is None else environ).get(setting.env, "")
    return bool(parse(setting, text))


def openmp_threads() -> str:
    """Return the value of OMP_NUM_THREADS, which numerical libraries follow; empty when it is not set."""
    return os.environ.get("OMP_NUM_THREADS", "")


def doubtful_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each ``HOROVOD_*`` variable that is unknown, and one for those without effect.

    Args:
        environ: variables to read, whose values ``load`` has accepted; ``os.environ`` when omitted.
    """
    environ = os.environ if environ is None else environ
    known = [s.env for s in SETTINGS] + [*RANK_VARIABLES.values(), JOB_ID, SECRET_KEY, MEETING]
    idle = [s.env for s in INERT if s.env in environ and parse(s, environ[s.env]) != s.default]
    sentences = [f"without effect in this version (docs/environment.md): {', '.join(idle)}"] if idle else []
    for name in sorted(environ):
        if name.startswith("HOROVOD_") and name not in known and not name.startswith(_FOREIGN_PREFIXES):
            meant = nearest(name[8:], [k[8:] for k in known])
            hint = f"; did you mean HOROVOD_{meant}?" if meant else ""
            sentences.append(f"{name} is not a setting of this version{hint}")
    return sentences
