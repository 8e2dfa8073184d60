"""Settings of executors; ``create_settings`` creates them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from horovod.bindings.misuse import is_integer
from horovod.config import Config
from horovod.launch.assemble import interface_names
from horovod.launch.elastic_options import cool_down_range, seconds

__all__ = ["MiniSettings", "Resources", "check_gpus", "check_whole"]

_DEFAULT_START_TIMEOUT_S: float = Config().start_timeout_s


@dataclass
class MiniSettings:
    """Settings of an executor, with Horovod's names."""

    nics: Iterable[str] | None = None  # network interfaces over which ranks communicate; all when None
    verbose: int | None = None  # accepted and ignored
    key: str | None = None  # accepted and ignored: each job creates its own
    ssh_port: int | None = None  # accepted and ignored: Ray starts the processes
    ssh_identity_file: str | None = None  # accepted and ignored
    ssh_str: str | None = None  # accepted and ignored
    # seconds that ``hvd.init()`` of a rank waits for the others; the minimum is HOROVOD_START_TIMEOUT's default,
    # because ranks first import frameworks
    timeout_s: float = 30
    placement_group_timeout_s: float = 100  # seconds to wait for the cluster to reserve the workers' resources
    elastic: bool = False  # whether the job may change its size
    min_num_proc: int = 1  # minimum number of ranks of an elastic job
    max_num_proc: int | None = None  # maximum number; None for the number of the cluster's slots
    reset_limit: int | None = None  # maximum number of membership changes; None for no limit
    elastic_timeout: float = 600  # seconds that ranks of an elastic job wait for each other after a change
    # initial and maximum seconds until a slot with a failed actor is reused
    cooldown_range: tuple[float, float] | None = None
    discovery: Any = None  # lists the nodes that an elastic job may use

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Names of the network interfaces, in the launcher's format."""
        return interface_names(self.nics, "nics")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for all ranks."""
        found = {"HOROVOD_START_TIMEOUT": str(max(self.timeout_s, _DEFAULT_START_TIMEOUT_S))}
        return found | ({"HOROVOD_GLOO_IFACE": ",".join(self.interfaces)} if self.interfaces else {})

    def check(self) -> None:
        """Check the settings of all jobs.

        Raises:
            ValueError: a time or a name is none; names the setting.
        """
        for name in ("timeout_s", "placement_group_timeout_s", "elastic_timeout"):
            if seconds(getattr(self, name), name) is None:
                raise ValueError(f"{name} must be a number of seconds, at least 0; received None")
        interface_names(self.nics, "nics")

    def check_elastic(self, fewest: str, most: str) -> None:
        """Check the settings of an elastic job.

        Args:
            fewest: name of the argument for ``min_num_proc``.
            most: name of the argument for ``max_num_proc``.

        Raises:
            ValueError: a setting is not a number, or out of range; names it.
        """
        self.check()
        check_whole(self.min_num_proc, fewest, 1)
        if self.max_num_proc is not None:
            check_whole(self.max_num_proc, most, 1)
            if self.max_num_proc < self.min_num_proc:
                raise ValueError(
                    f"{most} must be at least {fewest}; received {self.max_num_proc} and {self.min_num_proc}"
                )
        if self.reset_limit is not None:
            check_whole(self.reset_limit, "reset_limit", 0)
        cool_down_range(self.cooldown_range, "cooldown_range")


@dataclass(frozen=True)
class Resources:
    """Resources of one worker.

    Raises:
        ValueError: a number is negative.
    """

    cpus: float = 1
    gpus: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.cpus, (int, float)) or self.cpus < 0:
            raise ValueError(f"the number of CPUs of a worker must be at least 0; received {self.cpus!r}")

    def bundle(self, count: int = 1) -> dict[str, float]:
        """Return the bundle of a placement group for some workers."""
        found = {"CPU": self.cpus * count, "GPU": float(self.gpus * count)}
        return {name: amount for name, amount in found.items() if amount}

    def slots(self, resources: dict[str, float]) -> int:
        """Return the number of workers that a node's resources suffice for."""
        needs = self.bundle()
        if not needs:
            return 1
        return int(min(resources.get(name, 0.0) // amount for name, amount in needs.items()))


def check_whole(value: Any, name: str, least: int) -> None:
    """Check a number of workers or the like.

    Args:
        value: the number.
        name: name of the argument.
        least: minimum.

    Raises:
        ValueError: no whole number, or too small.
    """
    if not is_integer(value) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; received {value!r}")


def check_gpus(use_gpu: bool, gpus: int | None, name: str) -> int:
    """Return the number of GPUs of one worker.

    Args:
        use_gpu: whether workers have GPUs.
        gpus: number of GPUs per worker; 1 when None.
        name: name of that argument.

    Raises:
        ValueError: arguments contradict each other.
    """
    if gpus is not None and not use_gpu:
        raise ValueError(f"{name}={gpus} is set, but use_gpu is False: {name} needs use_gpu=True")
    if gpus is not None:
        check_whole(gpus, name, 1)
    return (gpus or 1) if use_gpu else 0
