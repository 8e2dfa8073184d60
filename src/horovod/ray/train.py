"""Ranks in the workers of Ray Train: ``DataParallelTrainer(..., backend_config=HorovodConfig())``.

``DataParallelTrainer`` is Ray's own, imported from the path of the installed version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.constants import is_v2_enabled

from horovod import context
from horovod.bindings.hosted import RETURNED
from horovod.launch.assemble import environment, interface_names
from horovod.launch.workers import WorkerJob, in_rank_order
from horovod.ray.nodes import node_name

if is_v2_enabled():
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
else:
    from ray.train.data_parallel_trainer import DataParallelTrainer

__all__ = ["DataParallelTrainer", "HorovodBackend", "HorovodConfig"]


@contextmanager
def _leaving_at_the_end() -> Iterator[None]:
    """Return a context that leaves the job at its end, so that no other rank waits for a failed one."""
    try:
        yield
    finally:
        context.shutdown(RETURNED)


@dataclass
class HorovodConfig(BackendConfig):
    """Makes each worker of a ``DataParallelTrainer`` a rank; the training function must call ``hvd.init()``.

    Attributes:
        env: additional environment variables for the workers, such as HOROVOD_TIMELINE.
        nics: network interfaces over which ranks find each other; all when empty.

    Raises:
        ValueError: ``env`` does not map names to texts, or ``nics`` are not names.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    nics: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.nics = interface_names(self.nics, "nics")
        self.env = environment(self.env, "env")

    @property
    def backend_cls(self) -> type[HorovodBackend]:
        """The class that prepares the workers."""
        return HorovodBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """The context of the training function on each worker."""
        return _leaving_at_the_end


class HorovodBackend(Backend):
    """Prepares the workers of a group; Ray Train creates another group after a failure or a change of size."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._jobs: dict[int, WorkerJob] = {}  # by group

    def on_start(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """Assign a rank to each worker.

        Args:
            worker_group: the workers.
            backend_config: the user's configuration.
        """
        places = worker_group.execute(_place)
        order = in_rank_order(range(len(places)), lambda i: places[i])
        job = WorkerJob([places[i] for i in order], backend_config.env, backend_config.nics)
        self._jobs[id(worker_group)] = job
        ray.get([worker_group.execute_single_async(i, _set, job.variables[rank]) for rank, i in enumerate(order)])

    def on_shutdown(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """End the job service.

        Args:
            worker_group: the workers.
            backend_config: as for ``on_start``.
        """
        if (job := self._jobs.pop(id(worker_group), None)) is not None:
            job.close()


def _place() -> str:
    return node_name(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def _set(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
