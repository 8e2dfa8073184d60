"""Settings of executors; ``create_settings`` creates them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from horovod.config import Config

__all__ = ["MiniSettings", "Resources", "check_gpus"]

_DEFAULT_START_TIMEOUT_S: float = Config().start_timeout_s


@dataclass
class MiniSettings:
    """Settings of an executor, with Horovod's names.

    Attributes:
        nics: network interfaces over which ranks communicate; all when None.
        verbose: accepted and ignored.
        key: accepted and ignored: each job creates its own.
        ssh_port: accepted and ignored: Ray starts the processes.
        ssh_identity_file: accepted and ignored.
        ssh_str: accepted and ignored.
        timeout_s: seconds that ``hvd.init()`` of a rank waits for the others; the minimum is HOROVOD_START_TIMEOUT's
            default, because ranks first import frameworks.
        placement_group_timeout_s: seconds to wait for the cluster to reserve the workers' resources.
        elastic: whether the job may change its size.
        min_num_proc: minimum number of ranks of an elastic job.
        max_num_proc: maximum number; None for the number of the cluster's slots.
        reset_limit: maximum number of membership changes; None for no limit.
        elastic_timeout: seconds that ranks of an elastic job wait for each other after a change.
        cooldown_range: initial and maximum seconds until a slot with a failed actor is reused.
        discovery: lists the nodes that an elastic job may use.
    """

    nics: Iterable[str] | None = None
    verbose: int | None = None
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    elastic: bool = False
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    cooldown_range: tuple[float, float] | None = None
    discovery: Any = None

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Names of the network interfaces, in the launcher's format."""
        return tuple([self.nics] if isinstance(self.nics, str) else self.nics or ())

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for all ranks."""
        found = {"HOROVOD_START_TIMEOUT": str(max(self.timeout_s, _DEFAULT_START_TIMEOUT_S))}
        return found | ({"HOROVOD_GLOO_IFACE": ",".join(self.interfaces)} if self.interfaces else {})


@dataclass(frozen=True)
class Resources:
    """Resources of one worker."""

    cpus: float = 1
    gpus: int = 0

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
    if gpus is not None and gpus < 1:
        raise ValueError(f"{name} must be at least 1; received {gpus}")
    return (gpus or 1) if use_gpu else 0
