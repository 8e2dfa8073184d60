"""A job of fixed size on actors that stay alive between calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from horovod.errors import LaunchError
from horovod.launch.call import check_call
from horovod.launch.workers import WorkerJob, first_cause, in_rank_order
from horovod.ray.failures import LOST, how_lost, lost_rank
from horovod.ray.nodes import node_name
from horovod.ray.settings import MiniSettings, Resources
from horovod.ray.strategy import Placement, place_on_hosts, place_packed, worker_options
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["StaticAdapter"]

#: Seconds to wait for the failure of the rank that caused the failures of others; and for the end of their calls.
_CAUSE_S = 2.0


class StaticAdapter:
    """Methods of ``RayExecutor`` for jobs of fixed size; see there.

    Args:
        settings: settings of the executor.
        resources: resources of one worker.
        count: number of workers; 0 if hosts are given.
        hosts: number of nodes, or 0.
        per_host: number of workers on each node.
        use_current: whether the caller's placement group is used.
    """

    def __init__(
        self, settings: MiniSettings, resources: Resources, count: int, hosts: int, per_host: int, use_current: bool
    ) -> None:
        self._settings, self._resources = settings, resources
        self._count, self._hosts, self._per_host, self._use_current = count, hosts, per_host, use_current
        self._placement: Placement | None = None
        self._job: WorkerJob | None = None
        self._workers: list[Any] = []  # by rank
        self._who: list[str] = []
        self._lost: dict[int, BaseException] = {}
        self._calls: list[Any] = []  # second results of calls that may still run
        # Held during a call: all ranks run the calls of several threads in one order, and a failed one ends no other.
        self._turn = threading.RLock()

    def start(self, executable: tuple[Any, Any, Any], extra_env_vars: Mapping[str, str]) -> None:
        """Start the actors, and make each of them a rank.

        Args:
            executable: class, arguments and keyword arguments of the object for functions of ``execute``.
            extra_env_vars: additional environment variables for the actors.

        Raises:
            LaunchError: the job runs already, or an actor failed.
            TimeoutError: the cluster does not have the workers' resources.
        """
        if self._workers:
            raise LaunchError("the workers run already; call shutdown() first")
        try:
            self._start(executable, extra_env_vars)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, executable: tuple[Any, Any, Any], extra_env_vars: Mapping[str, str]) -> None:
        limit_s = self._settings.placement_group_timeout_s
        if self._hosts:
            self._placement = place_on_hosts(self._resources, self._hosts, self._per_host, limit_s)
        else:
            self._placement = place_packed(self._resources, self._count, limit_s, self._use_current)
        actor = ray.remote(BaseHorovodWorker)
        self._workers = [
            actor.options(**worker_options(self._resources, self._placement.group, bundle)).remote()
            for bundle in self._placement.bundles
        ]
        try:
            places = ray.get([worker.place.remote() for worker in self._workers], timeout=limit_s)
        except GetTimeoutError:
            raise TimeoutError(
                f"not all of {len(self._workers)} workers have started within {limit_s:g} s "
                f"(placement_group_timeout_s): is the placement group large enough?"
            ) from None
        except LOST as error:
            raise LaunchError(f"a worker {how_lost(error)}") from error
        found = in_rank_order(zip(self._workers, places, strict=True), lambda each: each[1][0])
        self._workers = [worker for worker, _ in found]
        names = [node_name(node, address) for _, (node, address, _, _) in found]
        self._job = WorkerJob(names, {**self._settings.variables, **extra_env_vars}, self._settings.interfaces)
        gpus: dict[str, list[str]] = {}
        for name, (_, (_, _, _, own)) in zip(names, found, strict=True):
            gpus[name] = sorted({*gpus.get(name, []), *own}, key=lambda gpu: (len(gpu), gpu))
        refs = []
        for rank, (worker, (_, _, pid, _)) in enumerate(found):
            name, own = names[rank], dict(self._job.variables[rank])
            if gpus[name]:  # GPUs of all workers of the node: ranks choose by hvd.local_rank()
                own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[name])
            self._who.append(f"rank {rank} (actor {worker._actor_id.hex()}, pid {pid}, node {name})")
            refs.append(worker.update_env_vars.remote(own))
        ray.get(refs)
        if executable[0] is not None:
            self._collect([worker.start_executable.remote(*executable) for worker in self._workers])

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], queue: Any) -> list[Any]:
        """Call a function on all ranks, and return its results in rank order."""
        with self._one_call():
            return self._collect(self.run_remote(fn, args, kwargs, queue))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], queue: Any = None
    ) -> list[Any]:
        """Call a function on all ranks, and return the references of its results in rank order.

        Raises:
            ValueError: ``fn`` is not callable, or its arguments are not given as such.
        """
        check_call(fn, args, kwargs)
        with self._turn:
            self._check()
            call = ray.put((fn, tuple(args), dict(kwargs)))
            return [self._submit(rank, "call", call, queue) for rank in range(len(self._workers))]

    def execute(self, fn: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        """Call a function with the executable of each rank, and return its results in rank order."""
        with self._one_call():
            self._check()
            call = ray.put(fn)
            refs = [self._submit(rank, "call_executable", call, queue) for rank in range(len(self._workers))]
            return self._collect(refs)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the executable of rank 0, and return its result."""
        with self._one_call():
            self._check()
            return self._collect([self._submit(0, "call_executable", fn, None)])[0]

    @contextlib.contextmanager
    def _one_call(self) -> Iterator[None]:
        """Return a context for a call until its end. An interrupt ends the actors: nothing else ends a call of them."""
        try:
            with self._turn:
                yield
        except (KeyboardInterrupt, SystemExit):
            self.shutdown()
            raise

    def _check(self) -> None:
        if not self._workers:
            raise LaunchError("no workers run; Ctrl-C in a call ends them, too: call start() first")
        if self._lost:
            rank = min(self._lost)
            raise lost_rank(self._who[rank], self._lost[rank])
        ended, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=0) if self._calls else ([], [])
        try:
            ray.get(ended)
        except Exception:  # of a rank in run_remote(); others may still wait in hvd.init()
            self._leave()

    def _submit(self, rank: int, method: str, *args: Any) -> Any:
        value, done = getattr(self._workers[rank], method).options(num_returns=2).remote(*args)
        job, who, lost = self._job, self._who[rank], self._lost
        self._calls.append(done)
        done.future().add_done_callback(lambda future: self._note_end(job, rank, who, lost, future))
        return value

    def _note_end(
        self, job: WorkerJob | None, rank: int, who: str, lost: dict[int, BaseException], future: Future[Any]
    ) -> None:
        """Notify the other ranks of a lost actor; runs in a Ray thread, maybe after ``shutdown`` has killed it."""
        error = future.exception()
        if isinstance(error, LOST) and job is not None and job is self._job and rank not in lost:
            lost[rank] = error
            job.ended(rank, who, how_lost(error))

    def _collect(self, refs: Sequence[Any]) -> list[Any]:
        """Return the results of calls; raise the original cause of a failure."""
        job, values = self._job, dict[int, Any]()
        errors: dict[int, BaseException] = {}
        waiting = {ref: i for i, ref in enumerate(refs)}

        def take(ready: Sequence[Any]) -> None:
            for ref in ready:
                i = waiting.pop(ref)
                try:
                    values[i] = ray.get(ref)
                except Exception as error:
                    errors[i] = error

        while waiting and not errors:
            take(ray.wait(list(waiting), num_returns=1)[0])
        if not errors:
            return [values[i] for i in range(len(refs))]
        if waiting:
            take(ray.wait(list(waiting), num_returns=len(waiting), timeout=_CAUSE_S)[0])
        if job is None or job is not self._job:
            error = errors[min(errors)]
            raise LaunchError("the workers were ended during this call, by shutdown() or Ctrl-C") from error
        lost = [rank for rank, error in errors.items() if isinstance(error, LOST)]
        self._leave()
        for ref in list(waiting):
            with contextlib.suppress(Exception):  # Ray would print an error that nobody has taken
                ray.get(ref, timeout=0)
        if lost:
            rank = min(lost)
            self._lost.setdefault(rank, errors[rank])
            raise lost_rank(self._who[rank], errors[rank])
        cause = first_cause([errors[i] for i in sorted(errors)])
        rank = next(i for i, error in errors.items() if error is cause)
        if hasattr(cause, "add_note"):
            cause.add_note(f"raised on {self._who[rank]}")
        raise cause

    def _leave(self) -> None:
        """Have all ranks leave the job: the next call begins with hvd.init(), and must not meet ranks of this one."""
        for ref in self._calls:
            ray.cancel(ref)  # ends a wait in hvd.init()
        self._calls = []
        reset = [worker.reset.remote() for worker in self._workers]
        ray.wait(reset, num_returns=len(reset), timeout=_CAUSE_S)

    def shutdown(self) -> None:
        """End the actors, and release the resources."""
        job, self._job = self._job, None  # so that no actor counts as lost
        for worker in self._workers:
            ray.kill(worker)
        self._workers, self._who, self._lost, self._calls = [], [], {}, []
        if self._placement is not None:
            self._placement.remove()
            self._placement = None
        if job is not None:
            job.close()
