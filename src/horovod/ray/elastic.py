"""Elastic jobs on Ray: lost actors are replaced, while the other ranks keep their processes."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod.core.membership_events import Policy, Slot
from horovod.errors import LaunchError
from horovod.launch.elastic_workers import ElasticWorkers, End, WorkerAdapter
from horovod.logs import logger
from horovod.ray import ray_logger
from horovod.ray.failures import LOST, how_lost, traceback_text
from horovod.ray.nodes import RayHostDiscovery, alive_nodes, free_slots, node_name
from horovod.ray.settings import MiniSettings, Resources, check_gpus
from horovod.ray.strategy import worker_options
from horovod.ray.worker import BaseHorovodWorker
from horovod.world import process_status

__all__ = ["ElasticAdapter", "ElasticRayExecutor", "RayHostDiscovery"]

#: Interval in seconds between queries of the cluster's nodes.
_DISCOVERY_S = 1.0
_UNLIMITED = 1 << 20
_COOL_DOWN_S = (1.0, 600.0)


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
        """Record the arguments for the processes; each call starts the processes."""
        self._executable = executable
        self._variables = {**self._settings.variables, **extra_env_vars}

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], queue: Any) -> list[Any]:
        """Run a function as an elastic job, and return the results of the last generation, in rank order.

        Raises:
            LaunchError: too few workers were left, or the function failed.
        """
        return self._run((fn, tuple(args), dict(kwargs)), None, queue)

    def execute(self, fn: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        """Like ``run``, with a function that takes the executable of its process."""
        return self._run((fn, (), {}), self._executable, queue)

    def _run(self, call: Any, executable: tuple[Any, Any, Any] | None, queue: Any) -> list[Any]:
        settings = self._settings
        fewest, most = settings.min_num_proc, settings.max_num_proc or _UNLIMITED
        policy = Policy(
            size=max(fewest, min(most, free_slots(self._resources))),
            is_elastic=True,
            minimum=fewest,
            maximum=most,
            resets=settings.reset_limit,
            cool_down_s=settings.cooldown_range or _COOL_DOWN_S,
            timeout_s=settings.elastic_timeout,
            is_discovering=True,
        )
        actors = _Actors(self._resources, settings.discovery, ray.put(call), executable, queue)
        job = actors.job = ElasticWorkers(actors, policy, self._variables, settings.interfaces)
        try:
            return job.run()
        finally:
            actors.close()
            job.close()

    def shutdown(self) -> None:
        """Do nothing: nothing runs between calls."""


class _Actors(WorkerAdapter):
    """Actors of one elastic job, each in its own placement group, which a replacement actor reuses."""

    job: ElasticWorkers

    def __init__(self, resources: Resources, discovery: Any, call: Any, executable: Any, queue: Any) -> None:
        self._resources, self._discovery = resources, discovery
        self._call = (executable, call, queue)
        self._nodes: dict[str, dict[str, Any]] = {}  # alive, by the name of the host
        self._actors: dict[Slot, Any] = {}
        self._groups: dict[Slot, Any] = {}
        self._doubtful: list[Any] = []  # actors that may be alive but unreachable
        self._look_at, self._problem = 0.0, ""

    def look(self) -> None:
        while self._doubtful:
            ray.kill(self._doubtful.pop())
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _DISCOVERY_S
        try:
            found, nodes = self._discovery.find_available_hosts_and_slots(), alive_nodes()
        except Exception as error:
            if str(error) != self._problem:
                logger.warning("the nodes that the job may use are not known, and stay as they are: %s", error)
            self._problem = str(error)
            return
        self._nodes = {node_name(id_, node["NodeManagerAddress"]): node for id_, node in nodes.items()}
        self.job.offer({host: found[key] for host, node in self._nodes.items() for key in _keys(node) if key in found})
        for slot in [slot for slot in self._groups if slot.host not in self._nodes]:
            self.kill(slot)
            remove_placement_group(self._groups.pop(slot))

    def start(self, slot: Slot, variables: dict[str, str]) -> None:
        node = self._nodes.get(slot.host)
        if node is None:
            self.job.ended(End(slot, "was lost with its node before it was started"))
            return
        if slot not in self._groups:
            bundle = self._resources.bundle() or {"CPU": 0.001}
            selector = [{"ray.io/node-id": node["NodeID"]}]
            self._groups[slot] = placement_group([bundle], bundle_label_selector=selector)
        options = worker_options(self._resources, self._groups[slot], 0)
        actor = self._actors[slot] = ray.remote(BaseHorovodWorker).options(**options).remote()
        if self._resources.gpus:  # GPUs of all workers of the node: ranks choose by hvd.local_rank()
            gpus = range(int(node["Resources"].get("GPU", 0)))
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        done = actor.call_elastic.remote(variables, *self._call)
        done.future().add_done_callback(functools.partial(self._report, slot, actor))

    def _report(self, slot: Slot, actor: Any, future: Future[Any]) -> None:
        """Report the end of a call; runs in a Ray thread, in which calls to Ray never return."""
        error = future.exception()
        if error is None:
            end = End(slot, value=future.result())
        elif isinstance(error, LOST):
            self._doubtful.append(actor)
            self._look_at = 0.0  # its node may be lost
            end = End(slot, how_lost(error))
        else:
            cause = getattr(error, "cause", error) if isinstance(error, RayTaskError) else error
            how = f"raised {type(cause).__name__}: {cause}".partition("\n")[0]
            end = End(slot, how, error=error, text=traceback_text(error))
        self.job.ended(end)

    def kill(self, slot: Slot) -> None:
        if slot in self._actors:
            ray.kill(self._actors[slot])

    def describe(self, slot: Slot) -> str:
        actor = self._actors.get(slot)
        return f"actor {actor._actor_id.hex()}, node {slot.host}" if actor is not None else f"node {slot.host}"

    def kill_stopped(self, slot: Slot, pid: int) -> None:
        node = self._nodes.get(slot.host)
        if node is not None:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ray.remote(_kill_if_stopped).options(num_cpus=0, scheduling_strategy=there).remote(pid)

    def close(self) -> None:
        """End all actors, and release the resources."""
        for actor in self._actors.values():
            ray.kill(actor)
        for group in self._groups.values():
            remove_placement_group(group)


def _keys(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that a discovery may use for a node."""
    return node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]


def _kill_if_stopped(pid: int) -> None:
    import os
    import signal
    from pathlib import Path

    if process_status(Path("/proc"), pid)[0] in "Tt":
        os.kill(pid, signal.SIGKILL)


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
        self._adapter: ElasticAdapter | None = None

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
        check_sizes(fewest, most, "min_num_proc", "max_num_proc")
        return MiniSettings(
            nics=nics, timeout_s=timeout_s, ssh_identity_file=ssh_identity_file, elastic=True, min_num_proc=fewest,
            max_num_proc=most, reset_limit=reset_limit, elastic_timeout=elastic_timeout, **kwargs,
        )  # fmt: skip

    def start(self) -> None:
        """Prepare the executor; ``run`` starts the workers."""
        self._adapter = ElasticAdapter(self.settings, self._resources)
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
            return self._adapter.run(worker_fn, (), {}, queue)


def check_sizes(fewest: int, most: int | None, name: str, limit: str) -> None:
    """Check the limits of an elastic job.

    Args:
        fewest: minimum number of ranks.
        most: maximum number of ranks; None for no limit.
        name: name of the first argument.
        limit: name of the second argument.

    Raises:
        ValueError: the limits are invalid.
    """
    if fewest < 1 or (most is not None and most < fewest):
        raise ValueError(f"{name} must be at least 1, and {limit} not less; received {fewest} and {most}")
