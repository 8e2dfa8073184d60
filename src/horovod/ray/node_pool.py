"""The nodes of the Ray cluster as the hosts of an elastic job, whose processes are actors."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod.launch.host_pool import Pool, ReadyHost
from horovod.launch.hosts import HostSlots
from horovod.launch.job import Job
from horovod.launch.plan import LaunchPlan
from horovod.ray.failures import LOST, how_lost, is_node_lost, traceback_text
from horovod.ray.nodes import alive_nodes, free_slots, node_name
from horovod.ray.settings import Resources
from horovod.ray.strategy import worker_options
from horovod.ray.worker import BaseHorovodWorker
from horovod.world import is_stopped

__all__ = ["NodePool"]

#: Interval in seconds between queries of the cluster's nodes.
_LOOK_S = 1.0


class NodePool(Pool):
    """The nodes of the cluster that an elastic job may use.

    Args:
        resources: resources of one worker.
        discovery: lists the nodes, with ``find_available_hosts_and_slots``.
        fewest: minimum number of workers, for a message.
        timeout_s: seconds that a worker may wait for its resources.
        call: executable, call and queue, as ``BaseHorovodWorker.call_elastic`` takes them.
    """

    plan: LaunchPlan

    def __init__(self, resources: Resources, discovery: Any, fewest: int, timeout_s: float, call: Any) -> None:
        self.resources, self.timeout_s, self.call = resources, timeout_s, call
        self.problems: list[str] = []
        self.error: BaseException | None = None  # the latest one that a function raised
        self.problem = ""  # the reason why workers cannot be started
        self._discovery, self._fewest = discovery, fewest
        self._nodes: dict[str, dict[str, Any]] = {}  # alive, by name
        self._slots: dict[str, int] = {}
        self._jobs: dict[str, _NodeJob] = {}
        self._lost: set[str] = set()  # Ray may list them for some seconds more; a node that restarts has another name
        self._look_at = 0.0

    @property
    def usable(self) -> dict[str, int]:
        """Slots of the nodes that workers may be started on, by name."""
        return {name: slots for name, slots in self._slots.items() if name in self._jobs}

    def offer(self, hosts: Mapping[str, HostSlots]) -> None:
        """Do nothing: the discovery lists the nodes."""

    def lose(self, name: str, number: int | None) -> None:
        """Forget a node whose loss has been reported."""
        del self._jobs[name]
        self._lost.add(name)

    def tend(self, poll: select.poll) -> list[ReadyHost]:
        """Query the nodes when it is time, and return those that are new."""
        if time.monotonic() >= self._look_at:
            self.look()
        found = []
        for name in self._slots:
            if name not in self._jobs and name not in self._lost:
                job = self._jobs[name] = _NodeJob(name, self._nodes[name], self)
                found.append(ReadyHost(name, job, int(self._nodes[name]["Resources"].get("CPU", 1))))
        return found

    def look(self) -> int:
        """Query the nodes of the cluster; return the number of workers that they have room for."""
        self._look_at = time.monotonic() + _LOOK_S
        try:
            waiting = sum([job.unplaced() for job in self._jobs.values()])
            free, found = free_slots(self.resources), self._discovery.find_available_hosts_and_slots()
            nodes = alive_nodes()
        except Exception as error:
            self._report(f"the nodes that the job may use are not known, and stay as they are: {error}")
            return sum(self._slots.values())
        self._nodes = {node_name(id_, node["NodeManagerAddress"]): node for id_, node in nodes.items()}
        offered = {name: found[key] for name, node in self._nodes.items() for key in _keys(node) if key in found}
        # Others may use a part of a node, and its workers would wait for them while another node has room.
        room_on = {name: free.get(node["NodeID"], 0) for name, node in self._nodes.items()}
        room_on |= {name: job.room(room_on[name]) for name, job in self._jobs.items() if name in room_on}
        self._slots = {name: slots for name in offered if (slots := min(offered[name], room_on[name]))}
        room, each = sum(self._slots.values()), self.resources.bundle()
        if room < self._fewest:
            self._report(f"the Ray nodes have room for {room} of at least {self._fewest} workers with {each} each")
        elif waiting:
            self._report(f"Ray has not reserved {each} for {waiting} of the workers yet: is it in use?")
        else:
            self.problem = ""
        for name, job in self._jobs.items():
            if name not in self._nodes:
                job.lose("Ray does not list it as alive any more")
        return room

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.problems.append(problem)

    def due_at(self) -> list[float]:
        """Return the time of the next query."""
        return [self._look_at]

    def close(self) -> None:
        """Do nothing: each node has an owner."""


class _NodeJob(Job):
    """The actors on one node, each in its own placement group, which a replacement actor reuses.

    Args:
        host: name of the node.
        node: Ray's description of it.
        pool: the pool that it belongs to.
    """

    def __init__(self, host: str, node: Mapping[str, Any], pool: NodePool) -> None:
        super().__init__(host)
        self._node, self._pool = node, pool
        self._actors: dict[int, Any] = {}  # running
        self._names: dict[int, str] = {}
        self._groups: dict[int, Any] = {}  # by slot
        self._unplaced: dict[int, tuple[int, float]] = {}  # rank and time of start, by slot that Ray has not reserved
        self._probes: dict[int, Any] = {}  # by process, whether it is stopped
        self._ended: deque[tuple[int, Future[Any]]] = deque()
        self._why_lost, self._is_finishing = "", False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # of the descriptor

    def fileno(self) -> int:
        return self._wake

    def _notify(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def unplaced(self) -> int:
        """Return the number of slots that Ray has not reserved yet; kill the actors that have waited too long."""
        now = time.monotonic()
        for slot, (rank, since) in tuple(self._unplaced.items()):
            if placement_group_table(self._groups[slot]).get("state") != "PENDING":
                del self._unplaced[slot]
            elif now - since > self._pool.timeout_s:
                self.kill_rank(rank)
        return sum(now - since > _LOOK_S for _, since in self._unplaced.values())

    def room(self, free: int) -> int:
        """Return the number of slots for this job where ``free`` workers could start beside the reserved ones."""
        return max(len(self._groups) - len(self._unplaced) + free, len(self._groups))

    def start(self, stdin: int | None) -> None:
        """Do nothing: each actor starts by itself."""

    def start_rank(self, rank: int, slot: int, environ: Mapping[str, str], output: Sequence[int] = ()) -> None:
        resources = self._pool.resources
        if slot not in self._groups:
            selector = [{"ray.io/node-id": self._node["NodeID"]}]
            bundle = resources.bundle() or {"CPU": 0.001}
            self._groups[slot] = placement_group([bundle], bundle_label_selector=selector)
            self._unplaced[slot] = rank, time.monotonic()
        elif slot in self._unplaced:
            self._unplaced[slot] = rank, time.monotonic()
        # Ray divides the cores of a node among its actors.
        variables = {**self._pool.plan.environ, **{k: v for k, v in environ.items() if k.startswith("HOROVOD_")}}
        if resources.gpus:  # GPUs of all workers of the node: ranks choose by hvd.local_rank()
            gpus = range(int(self._node["Resources"].get("GPU", 0)))
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        options = worker_options(resources, self._groups[slot], 0)
        actor = self._actors[rank] = ray.remote(BaseHorovodWorker).options(**options).remote()
        self._names[rank] = f"actor {actor._actor_id.hex()}"
        done = actor.call_elastic.remote(variables, *self._pool.call).future()

        def take(future: Future[Any]) -> None:  # in a Ray thread, in which calls to Ray never return
            self._ended.append((rank, future))
            self._notify()

        done.add_done_callback(take)

    def name_of(self, rank: int) -> str:
        return self._names[rank]

    def kill_rank(self, rank: int) -> None:
        if rank in self._actors:
            ray.kill(self._actors[rank])

    def kill_stopped(self, rank: int, pid: int) -> None:
        if pid in self._probes and not ray.wait([self._probes[pid]], timeout=0)[0]:
            return  # Ray starts a process for each of them
        there = NodeAffinitySchedulingStrategy(self._node["NodeID"], soft=False)
        probe = ray.remote(_kill_if_stopped).options(num_cpus=0, scheduling_strategy=there)
        self._probes[pid] = probe.remote(pid)

    def finish(self) -> None:
        self._is_finishing = True
        self._notify()

    def tell(self, order: bytes) -> None:
        for actor in self._actors.values() if order in (b"T", b"K") else ():
            ray.kill(actor)

    def lose(self, why: str) -> None:
        """Report the loss of this node with the next news.

        Args:
            why: the reason.
        """
        self._why_lost = self._why_lost or why
        self._notify()

    def news(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        lost = {rank: error for rank, future in ended if isinstance(error := future.exception(), LOST)}
        for rank, future in ended:
            if rank not in lost:
                yield from self._take_end(rank, future)
        if lost and not self._is_finishing:
            self._pool.look()
            if any(map(is_node_lost, lost.values())):
                self.lose("Ray reports it as lost")
        if self._why_lost:
            yield {"lost": self._why_lost}
            return
        for rank, future in ended:
            if rank in lost:
                yield from self._take_end(rank, future)
        if self._is_finishing and not self._actors:
            yield {"done": True}

    def _take_end(self, rank: int, future: Future[Any]) -> Iterator[dict[str, Any]]:
        ray.kill(self._actors.pop(rank))  # it may be alive, and out of reach
        error, status, how = future.exception(), 0, ""
        if error is None:
            self.results[rank] = future.result()
        elif isinstance(error, LOST):
            status, how = -signal.SIGKILL, how_lost(error)
        else:
            cause = getattr(error, "cause", error) if isinstance(error, RayTaskError) else error
            status, how = 1, f"raised {type(cause).__name__}: {cause}".partition("\n")[0]
            if not self._is_finishing:  # else it is a consequence of the job's end
                self._pool.error = error
                yield {"output": (rank, "stderr"), "data": f"{traceback_text(error)}\n".encode()}
        yield {"ended": rank, "pid": 0, "status": status, "sent": 0, "has_begun": True, "how": how}

    def kill(self) -> None:
        """End all actors, and release the resources."""
        for actor in self._actors.values():
            ray.kill(actor)
        for group in self._groups.values():
            remove_placement_group(group)
        self._actors.clear()
        self._groups.clear()
        self._unplaced.clear()

    hang_up = kill

    def close(self) -> None:
        self.kill()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1


def _keys(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that a discovery may use for a node."""
    return node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]


def _kill_if_stopped(pid: int) -> None:
    if is_stopped(pid):
        os.kill(pid, signal.SIGKILL)
