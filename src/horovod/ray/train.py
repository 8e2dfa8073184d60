"""Ranks in the workers of Ray Train: ``DataParallelTrainer(..., backend_config=HorovodConfig())``.

``DataParallelTrainer`` is Ray's own, from where the installed version has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.constants import is_v2_enabled

from horovod import context
from horovod.launch.workers import WorkerJob, in_rank_order
from horovod.ray.nodes import node_name

if is_v2_enabled():
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
else:
    from ray.train.data_parallel_trainer import DataParallelTrainer

__all__ = ["DataParallelTrainer", "HorovodBackend", "HorovodConfig"]


@contextmanager
def _leaving_at_the_end() -> Iterator[None]:
    """Leave the job when the training function ends, so that no other rank waits for one that has failed."""
    try:
        yield
    finally:
        context.shutdown()


@dataclass
class HorovodConfig(BackendConfig):
    """Makes each worker of a ``DataParallelTrainer`` a rank; its function calls ``hvd.init()``.

    Attributes:
        env: more variables for the environment of the workers, such as HOROVOD_TIMELINE.
        nics: network interfaces at which ranks find each other; all when empty.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    nics: tuple[str, ...] = ()

    @property
    def backend_cls(self) -> type[HorovodBackend]:
        """The class that prepares the workers."""
        return HorovodBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """The context of the training function on each worker."""
        return _leaving_at_the_end


class HorovodBackend(Backend):
    """Prepares the workers of one group; Ray Train makes another group after a failure, and when its size changes."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._jobs: dict[int, WorkerJob] = {}  # by group

    def on_start(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """Give each worker its rank.

        Args:
            worker_group: the workers.
            backend_config: what the user wants.
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
