"""Elastic jobs on Ray: lost actors are replaced, while the other ranks keep their processes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from horovod.errors import LaunchError
from horovod.launch.call import check_call, check_outcome, sink_of
from horovod.launch.elastic_assembly import run_on_pool
from horovod.launch.elastic_options import ElasticOptions, cool_down_range
from horovod.launch.output import NullSink
from horovod.launch.plan import Display, LaunchPlan
from horovod.launch.workers import listen_addresses
from horovod.ray import ray_logger
from horovod.ray.client import in_cluster
from horovod.ray.node_pool import NodePool
from horovod.ray.nodes import RayHostDiscovery, wait_for_releases
from horovod.ray.settings import MiniSettings, Resources, check_gpus

__all__ = ["ElasticAdapter", "ElasticRayExecutor", "RayHostDiscovery"]

_UNLIMITED = 1 << 20


class ElasticAdapter:
    """Methods of ``RayExecutor`` for elastic jobs; see there.

    Args:
        settings: settings of the executor, including the discovery.
        resources: resources of one worker.
    """

    def __init__(self, settings: MiniSettings, resources: Resources) -> None:
        self._settings, self._resources = settings, resources
        self._executable: tuple[Any, Any, Any] = (None, None, None)
        self._variables: dict[str, str] = {}

    def start(self, executable: tuple[Any, Any, Any], extra_env_vars: Mapping[str, str]) -> None:
        """Record the arguments for the processes; each call starts the processes.

        Raises:
            InitError: a network interface does not exist, or has no address.
        """
        listen_addresses(self._settings.interfaces)
        self._executable = executable
        self._variables = {**self._settings.variables, **{name: str(value) for name, value in extra_env_vars.items()}}

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], queue: Any) -> list[Any]:
        """Run a function as an elastic job, and return the results of the last generation, in rank order.

        Raises:
            LaunchError: too few workers were left, or the function failed.
            ValueError: ``fn`` is not callable, or its arguments are not given as such.
        """
        check_call(fn, args, kwargs)
        return self._run((fn, tuple(args), dict(kwargs)), None, queue)

    def execute(self, fn: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        """Like ``run``, with a function that takes the executable of its process."""
        return self._run((fn, (), {}), self._executable, queue)

    def _run(self, call: Any, executable: tuple[Any, Any, Any] | None, queue: Any) -> list[Any]:
        settings, resources = self._settings, self._resources
        fewest, most = settings.min_num_proc, settings.max_num_proc or _UNLIMITED
        cool_down_s = cool_down_range(settings.cooldown_range, "cooldown_range")
        timeout_s = settings.elastic_timeout
        pool = NodePool(resources, settings.discovery, fewest, timeout_s, (executable, ray.put(call), queue))
        wait_for_releases()  # of a job that has just ended
        size = max(fewest, min(most, pool.look()))
        options = ElasticOptions(size, fewest, most, reset_limit=settings.reset_limit, cool_down_s=cool_down_s)
        policy = replace(options.policy(timeout_s, 0.0), is_discovering=True)
        display = Display(launcher="horovod.ray", place="Ray node")
        plan = LaunchPlan((), os.uname().nodename, self._variables, (), display=display)
        sinks = NullSink(), sink_of(sys.stderr, sys.__stderr__)
        outcome, results = run_on_pool(plan, sinks, options, policy, pool, settings.interfaces)
        outcome.lines[1:1] = [pool.problem] if outcome.code and pool.problem else []
        check_outcome(outcome, lambda line: sinks[1].put(f"{display.launcher}: {line}\n".encode()), pool.error)
        return results

    def shutdown(self) -> None:
        """Do nothing: nothing runs between calls."""


class ElasticRayExecutor:
    """Runs elastic jobs on the nodes of the Ray cluster; see also ``RayExecutor(min_workers=...)``.

    Args:
        settings: result of ``create_settings``.
        use_gpu: whether each worker has GPUs.
        cpus_per_slot: CPUs of each worker.
        gpus_per_slot: GPUs of each worker; 1 when omitted, if ``use_gpu``.
        env_vars: additional environment variables for the workers.
        override_discovery: whether to use the Ray cluster's nodes; otherwise ``settings.discovery`` lists the nodes.

    Raises:
        ValueError: arguments contradict each other.
    """

    def __init__(
        self,
        settings: MiniSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: dict[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        settings.check_elastic("min_num_proc", "max_num_proc")  # attributes may have been set since
        self.settings = settings
        self._resources = Resources(cpus_per_slot, check_gpus(use_gpu, gpus_per_slot, "gpus_per_slot"))
        self._variables = dict(env_vars or {})
        if override_discovery:
            settings.discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot)
        elif not hasattr(settings.discovery, "find_available_hosts_and_slots"):
            raise ValueError(
                "override_discovery=False needs settings.discovery, an object with find_available_hosts_and_slots(); "
                f"received {settings.discovery!r}"
            )
        self._adapter: Any = None

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: int = 600,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        nics: str | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> MiniSettings:
        """Return settings for the constructor.

        Args:
            min_num_proc: minimum number of ranks.
            max_num_proc: maximum number of ranks; None for the number of slots.
            reset_limit: maximum number of membership changes; None for no limit.
            elastic_timeout: seconds that ranks wait for each other after a change.
            timeout_s: as for ``RayExecutor.create_settings``.
            ssh_identity_file: accepted and ignored.
            nics: network interfaces over which ranks communicate.
            min_np: deprecated; use ``min_num_proc``.
            max_np: deprecated; use ``max_num_proc``.
            **kwargs: other attributes of ``MiniSettings``.

        Raises:
            ValueError: a number is out of range.
            TypeError: a setting does not exist.
        """
        for name, value in (("min_np", min_np), ("max_np", max_np)):
            if value is not None:
                warnings.warn(f"{name} is deprecated; use {name[:3]}_num_proc", DeprecationWarning, stacklevel=2)
        fewest = min_num_proc if min_np is None else min_np
        most = max_num_proc if max_np is None else max_np
        settings = MiniSettings(
            nics=nics, timeout_s=timeout_s, ssh_identity_file=ssh_identity_file, elastic=True, min_num_proc=fewest,
            max_num_proc=most, reset_limit=reset_limit, elastic_timeout=elastic_timeout, **kwargs,
        )  # fmt: skip
        settings.check_elastic("min_num_proc", "max_num_proc")
        return settings

    def start(self) -> None:
        """Prepare the executor; ``run`` starts the workers.

        Raises:
            InitError: a network interface does not exist, or has no address.
        """
        self._adapter = in_cluster(ElasticAdapter, (self.settings, self._resources))
        self._adapter.start((None, None, None), self._variables)

    def run(
        self,
        worker_fn: Callable[[], Any],
        callbacks: Sequence[Callable[[dict[str, Any]], Any]] | None = None,
    ) -> list[Any]:
        """Run a function as an elastic job; it must call ``hvd.init()`` and a function of ``hvd.elastic.run``.

        Args:
            worker_fn: the function that each process calls.
            callbacks: functions called with each dictionary that a worker passes to ``ray_logger.log``.

        Returns:
            The results of the ranks of the last generation, in rank order.

        Raises:
            LaunchError: ``start`` was not called, too few workers were left, or the function failed.

        Blocks until the job is over.
        """
        if self._adapter is None:
            raise LaunchError("call start() first")
        with ray_logger.relayed(callbacks or ()) as queue:
            found: list[Any] = self._adapter.run(worker_fn, (), {}, queue)
            return found
