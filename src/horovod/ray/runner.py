"""``RayExecutor``: ranks on actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.ray import ray_logger
from horovod.ray.client import in_cluster
from horovod.ray.elastic import ElasticAdapter, RayHostDiscovery
from horovod.ray.settings import MiniSettings, Resources, check_gpus, check_whole
from horovod.ray.static import StaticAdapter
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "MiniSettings", "RayExecutor"]

_Callbacks = Sequence[Callable[[dict[str, Any]], Any]] | None


class RayExecutor:
    """Runs functions on ranks that are actors of a Ray cluster.

    Pass ``num_workers`` for ranks close to each other, ``num_hosts`` for the same number on each of several nodes, or
    ``min_workers`` for an elastic job. All workers of a node see all their GPUs: choose one by ``hvd.local_rank()``.

    Args:
        settings: result of ``create_settings``.
        num_workers: number of ranks.
        num_hosts: number of nodes.
        num_workers_per_host: number of ranks on each of ``num_hosts`` nodes.
        cpus_per_worker: CPUs of each rank.
        use_gpu: whether ranks have GPUs.
        gpus_per_worker: GPUs of each rank; 1 when omitted, if ``use_gpu``.
        use_current_placement_group: whether ``num_workers`` ranks run in the caller's placement group, if there is one,
            as in a trial of Ray Tune.
        min_workers: minimum number of ranks of an elastic job.
        max_workers: maximum number; None for as many as the cluster has resources for.
        reset_limit: maximum number of membership changes; None for no limit.
        cooldown_range: initial and maximum seconds until a slot with a failed actor is reused; ``(1, 600)`` when None.
        elastic_timeout: seconds that ranks wait for each other after a change.
        override_discovery: whether to use the Ray cluster's nodes; otherwise ``settings.discovery`` lists the nodes.

    Raises:
        ValueError: arguments contradict each other.
    """

    @staticmethod
    def create_settings(
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Any = None,
    ) -> MiniSettings:
        """Return settings for the constructor.

        Args:
            timeout_s: seconds that ``hvd.init()`` waits for other ranks; a value below HOROVOD_START_TIMEOUT's 600 has
                no effect.
            ssh_identity_file: accepted and ignored: Ray starts the processes.
            ssh_str: accepted and ignored.
            placement_group_timeout_s: seconds to wait for the cluster to reserve the workers' resources.
            nics: names of the network interfaces over which ranks communicate.
        """
        return MiniSettings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            ssh_str=ssh_str,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: MiniSettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Any = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers is not None and min_workers is None:
            raise ValueError("max_workers is for elastic jobs: give min_workers, too")
        given = {"num_workers": num_workers, "num_hosts": num_hosts, "min_workers": min_workers}
        found = {name: value for name, value in given.items() if value is not None}
        if len(found) != 1:
            raise ValueError(f"give one of num_workers, num_hosts and min_workers; received {found or 'none of them'}")
        for name, value in {**found, "num_workers_per_host": num_workers_per_host}.items():
            check_whole(value, name, 1)
        settings.check()
        self.settings = settings
        resources = Resources(cpus_per_worker, check_gpus(use_gpu, gpus_per_worker, "gpus_per_worker"))
        self._kind: type[Any] = StaticAdapter
        self._options: tuple[Any, ...] = (
            settings, resources, num_workers or 0, num_hosts or 0, num_workers_per_host, use_current_placement_group
        )  # fmt: skip
        if min_workers is not None:
            settings.elastic, settings.min_num_proc, settings.max_num_proc = True, min_workers, max_workers
            settings.reset_limit, settings.elastic_timeout = reset_limit, elastic_timeout
            settings.cooldown_range = cooldown_range
            settings.check_elastic("min_workers", "max_workers")
            if override_discovery or settings.discovery is None:
                settings.discovery = RayHostDiscovery(use_gpu, cpus_per_worker, gpus_per_worker)
            self._kind, self._options = ElasticAdapter, (settings, resources)
        self._adapter: Any = None

    def start(
        self,
        executable_cls: type[Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers; in an elastic job each ``run`` starts them.

        Args:
            executable_cls: class of an object that each worker creates, for functions of ``execute``.
            executable_args: positional arguments of the class.
            executable_kwargs: keyword arguments of the class.
            extra_env_vars: additional environment variables for the workers, such as HOROVOD_TIMELINE.

        Raises:
            LaunchError: the workers run already, or one has failed.
            InitError: a network interface does not exist, or has no address.
            TimeoutError: the cluster did not have the resources within ``placement_group_timeout_s``.

        Blocks until the workers run.
        """
        if self._adapter is None:
            self._adapter = in_cluster(self._kind, self._options)
        self._adapter.start((executable_cls, executable_args, executable_kwargs), dict(extra_env_vars or {}))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: _Callbacks = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank, and return the results in rank order.

        Args:
            fn: the function; it must call ``hvd.init()``.
            args: its arguments.
            kwargs: its keyword arguments.
            callbacks: functions called with each dictionary that a rank passes to ``ray_logger.log``.

        Raises:
            LaunchError: an actor is lost (the message names rank, actor, node); or an elastic job could not continue.
            Exception: as ``fn`` raised it on the first rank that failed on its own.
            RuntimeError: ``start`` was not called.
            ValueError: ``fn`` is not callable, or its arguments are not given as such.

        Blocks until all ranks have returned.
        """
        with ray_logger.relayed(callbacks or ()) as queue:
            found: list[Any] = self._started().run(fn, () if args is None else args, kwargs or {}, queue)
            return found

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank without waiting, and return references to the results.

        Args:
            fn: the function.
            args: its arguments.
            kwargs: its named arguments.

        Raises:
            NotImplementedError: the job is elastic.
            RuntimeError: ``start`` was not called.
            ValueError: as for ``run``.
        """
        self._refuse_elastic("run_remote")
        found: list[Any] = self._started().run_remote(fn, () if args is None else args, kwargs or {})
        return found

    def execute(self, fn: Callable[[Any], Any], callbacks: _Callbacks = None) -> list[Any]:
        """Call ``fn(executable)`` on every rank, and return the results in rank order.

        Args:
            fn: the function; its argument is the object of ``executable_cls``, or None.
            callbacks: as for ``run``.

        Raises:
            LaunchError, RuntimeError: as for ``run``.
            Exception: as ``fn`` raised it.
        """
        with ray_logger.relayed(callbacks or ()) as queue:
            found: list[Any] = self._started().execute(fn, queue)
            return found

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0, and return its result.

        Args:
            fn: the function; its argument is the object of ``executable_cls``, or None.

        Raises:
            NotImplementedError: the job is elastic.
            LaunchError, RuntimeError: as for ``run``.
            Exception: as ``fn`` raised it.
        """
        self._refuse_elastic("execute_single")
        return self._started().execute_single(fn)

    def shutdown(self) -> None:
        """End the workers, and release their resources; ``start`` may follow."""
        if self._adapter is not None:
            self._adapter.shutdown()
            self._adapter = None

    def _started(self) -> Any:
        if self._adapter is None:
            raise RuntimeError("the workers have not been started: call start() first")
        return self._adapter

    def _refuse_elastic(self, name: str) -> None:
        if self._kind is ElasticAdapter:
            raise NotImplementedError(f"{name} is not for elastic jobs, whose ranks change: use run() or execute()")
