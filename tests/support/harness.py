"""Real ranks for tests: processes on shared memory, forked from a server that has their framework loaded already."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import inspect
import itertools
import multiprocessing
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import cloudpickle

from horovod.common import util
from horovod.pickling import pickled

_context = multiprocessing.get_context("forkserver")
_numbers = itertools.count()

#: How long anything in a test may take before it counts as a hang; below the limit of pytest.
LIMIT_S = 500.0


class _Server:
    """A process that has loaded modules, used nothing of them, and becomes one rank after the other."""

    def __init__(self, modules: Sequence[str], env: dict[str, str] | None = None) -> None:
        # OpenMP reads its number of threads when it is loaded: what a rank would set itself comes too late.
        self._env = {"OMP_NUM_THREADS": "1", **(env or {})}
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([*modules, "numpy", "cloudpickle", "horovod.numpy"])
        self._words = SimpleNamespace(
            connect_to_new_process=self._server.connect_to_new_process, read_signed=forkserver.read_signed
        )

    def start(self, process: Any) -> None:
        """Start a process of ``_context`` from this server."""
        usual, popen_forkserver.forkserver = popen_forkserver.forkserver, self._words
        try:
            with util.env(**self._env):
                process.start()
        finally:
            popen_forkserver.forkserver = usual


#: The environment of every rank of TensorFlow: one thread for computing, and no output about libraries.
_TENSORFLOW = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "TF_CPP_MIN_LOG_LEVEL": "3"}
#: By framework; a test names the one that its ranks need.
_servers = {
    # The first optimizer of a process loads ``torch._dynamo``, for which a rank would need a second.
    "torch": _Server(["torch", "torch._dynamo", "horovod.torch.adapter"]),
    "tensorflow": _Server(["tensorflow", "horovod.tensorflow"], _TENSORFLOW),
    "jax": _Server(["jax", "optax", "horovod.jax"], {"NPROC": "1"}),  # XLA's threads
    "popart": _Server(["torch", "torch._dynamo", "popart", "horovod.popart"]),
    # Keras loads TensorFlow where it is installed, as soon as it meets data, whatever its backend.
    **{
        f"keras-{backend}": _Server(["tensorflow", "keras", "horovod.keras"], {**_TENSORFLOW, **env})
        for backend, env in {
            "tensorflow": {"KERAS_BACKEND": "tensorflow"},
            "torch": {"KERAS_BACKEND": "torch"},
            "jax": {"KERAS_BACKEND": "jax", "JAX_ENABLE_X64": "1", "NPROC": "1"},
        }.items()
    },
    "tf_keras": _Server(["tensorflow", "horovod.tensorflow.keras"], {**_TENSORFLOW, "TF_USE_LEGACY_KERAS": "1"}),
}


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        rank: which.
        value: what its function returned.
        error: the exception it raised, or None.
        text: its traceback.
        exitcode: of the process; negative for a signal.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    exitcode: int | None = None


def _environments(size: int, env: dict[str, str] | None, hosts: Sequence[int]) -> list[dict[str, str]]:
    """The environment of each rank.

    Args:
        size: number of ranks.
        env: more variables.
        hosts: how many of the ranks are on each host, one after the other; all on one when empty.
    """
    job = {
        "HOROVOD_SIZE": str(size),
        "HOROVOD_JOB_ID": f"test-{os.getpid()}-{next(_numbers)}",
        "HOROVOD_SECRET_KEY": secrets.token_hex(16),
        "HOROVOD_START_TIMEOUT": f"{LIMIT_S:g}",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    places = []
    for host, count in enumerate(hosts or (size,)):
        for local_rank in range(count):
            higher = [index for index, other in enumerate(hosts or (size,)) if other > local_rank]
            places.append(
                {
                    "HOROVOD_RANK": str(len(places)),
                    "HOROVOD_LOCAL_RANK": str(local_rank),
                    "HOROVOD_LOCAL_SIZE": str(count),
                    "HOROVOD_CROSS_RANK": str(higher.index(host)),
                    "HOROVOD_CROSS_SIZE": str(len(higher)),
                    **({"HOROVOD_HOSTNAME": f"host-{chr(ord('a') + host)}"} if hosts else {}),
                }
            )
    assert len(places) == size
    return [{**place, **job} for place in places]


@contextlib.contextmanager
def _meeting(environments: list[dict[str, str]], hosts: Sequence[int]) -> Iterator[None]:
    """Let the ranks of several hosts, which are this machine in truth, meet as they do at horovodrun."""
    if not hosts:
        yield
        return
    from horovod.rendezvous.service import Service

    with contextlib.closing(Service(bytes.fromhex(environments[0]["HOROVOD_SECRET_KEY"]), ["127.0.0.1"])) as service:
        for environment in environments:
            environment["HOROVOD_MEETING"] = ",".join(service.endpoints)
        yield


def _pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    module = sys.modules.get(function.__module__)
    if module is not None and not function.__module__.startswith("horovod"):
        cloudpickle.register_pickle_by_value(module)
    return pickled((function, args))


def _run(rank: int, env: dict[str, str], payload: bytes, init: bool) -> tuple[Any, BaseException | None, str]:
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        del os.environ[name]
    os.environ.update(env)
    from horovod.bindings import process_sets

    try:
        function, args = cloudpickle.loads(payload)
        if init:
            process_sets.init()
        value = function(*args)
        return value, None, ""
    except BaseException as error:
        return None, error, traceback.format_exc()
    finally:
        process_sets.shutdown()


def _send(pipe: Connection, result: tuple[Any, BaseException | None, str]) -> None:
    try:
        packed = cloudpickle.dumps(result)
    except Exception:
        packed = cloudpickle.dumps((None, RuntimeError(repr(result[1])), result[2] or repr(result[0])))
    pipe.send_bytes(packed)


def _child(rank: int, env: dict[str, str], payload: bytes, pipe: Connection, init: bool) -> None:
    result = _run(rank, env, payload, init)
    _send(pipe, result)
    if result[1] is not None:
        sys.exit(1)


def _worker(tasks: Connection, results: Connection) -> None:
    # Objects from before the first test stay: collecting them again and again takes longer than many a test.
    gc.collect()
    gc.freeze()
    while True:
        try:
            task = tasks.recv()
        except EOFError:
            return
        _send(results, _run(*task))
        # Objects and delayed warnings that a test leaves behind must not reach the next one.
        gc.collect()
        if "horovod.tensorflow.first_step" in sys.modules:
            sys.modules["horovod.tensorflow.first_step"].warn_now()


class Ranks:
    """``size`` running ranks.

    Args:
        size: how many.
        function: called on each, after init() and before shutdown().
        args: its arguments.
        env: more environment variables.
        init: whether init() and shutdown() are called around it.
        framework: which they have loaded.
        hosts: how many of the ranks are on each of several hosts, which are this machine in truth.
    """

    def __init__(
        self, size: int, function: Callable[..., Any], args: Sequence[Any] = (), env: dict[str, str] | None = None,
        init: bool = True, framework: str = "torch", hosts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        environments, payload = _environments(size, env, hosts), _pack(function, args)
        self.size = size
        self._meeting = contextlib.ExitStack()
        self._meeting.enter_context(_meeting(environments, hosts))
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_child, args=(rank, environments[rank], payload, theirs, init))
            _servers[framework].start(process)
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self.processes[rank].pid

    def outcomes(self, timeout_s: float = LIMIT_S) -> list[Outcome]:
        """Wait for all ranks and return how each ended; ends those that do not."""
        outcomes = [Outcome(rank) for rank in range(self.size)]
        deadline = time.monotonic() + timeout_s
        sentinels = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        try:
            while sentinels:
                ready = wait([*sentinels, *pipes], timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(sentinels.values())
                    raise AssertionError(f"ranks {late} did not end within {timeout_s} s")
                for item in ready:
                    if isinstance(item, int):
                        rank = sentinels.pop(item)
                        self.processes[rank].join()
                        outcomes[rank].exitcode = self.processes[rank].exitcode
                    elif item in pipes:
                        own = outcomes[pipes.pop(item)]
                        with contextlib.suppress(EOFError):
                            own.value, own.error, own.text = cloudpickle.loads(item.recv_bytes())
            return outcomes
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
            for pipe in self._pipes:
                pipe.close()
            self._meeting.close()


class _Pool:
    """Worker processes that are used again and again; ended and replaced as soon as one misbehaves."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._workers: list[tuple[Any, Connection, Connection]] = []

    def run(self, envs: Sequence[dict[str, str]], payload: bytes, init: bool, timeout_s: float) -> list[Outcome]:
        """Run a task on as many workers as there are environments."""
        size = len(envs)
        while len(self._workers) < size:
            # Two pipes rather than a pair of sockets, which the leak check would see.
            their_tasks, tasks = _context.Pipe(duplex=False)
            results, their_results = _context.Pipe(duplex=False)
            process = _context.Process(target=_worker, args=(their_tasks, their_results), daemon=True)
            self._server.start(process)
            their_tasks.close()
            their_results.close()
            self._workers.append((process, tasks, results))
        team = self._workers[:size]
        outcomes = [Outcome(rank) for rank in range(size)]
        try:
            for rank, (_, tasks, _) in enumerate(team):
                tasks.send((rank, envs[rank], payload, init))
            pending = {results: rank for rank, (_, _, results) in enumerate(team)}
            deadline = time.monotonic() + timeout_s
            while pending:
                ready = [
                    pipe
                    for pipe in wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
                    if isinstance(pipe, Connection)
                ]
                if not ready:
                    raise AssertionError(f"ranks {sorted(pending.values())} did not end within {timeout_s} s")
                for pipe in ready:
                    rank = pending.pop(pipe)
                    value, error, text = cloudpickle.loads(pipe.recv_bytes())
                    outcomes[rank] = Outcome(rank, value, error, text, 0 if error is None else 1)
        except BaseException:
            self.close()
            raise
        if any(outcome.error for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """End all workers."""
        for process, tasks, results in self._workers:
            process.kill()
            process.join()
            process.close()
            tasks.close()
            results.close()
        self._workers = []


_pools = {framework: _Pool(server) for framework, server in _servers.items()}
for _pool in _pools.values():
    atexit.register(_pool.close)


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    timeout_s: float = LIMIT_S,
    init: bool = True,
    framework: str = "torch",
    hosts: Sequence[int] = (),
    fresh: bool = False,
) -> list[Any]:
    """Run ``function(*args)`` on ``size`` ranks, which have ``framework`` loaded; return the results in rank order.

    The processes are used again by the next call, unless they are to be ``fresh``; a test that ends processes uses
    ``Ranks``. With ``hosts=(3, 1)`` the ranks take themselves for three of one host and one of another.

    Raises:
        AssertionError: a rank failed; with every failed rank's traceback.
    """
    for name, pool in _pools.items():
        # Workers of a framework take memory; tests come one framework after the other.
        if name != framework:
            pool.close()
    if fresh:
        outcomes = Ranks(size, function, args, env, init, framework, hosts).outcomes(timeout_s)
    else:
        environments = _environments(size, env, hosts)
        with _meeting(environments, hosts):
            outcomes = _pools[framework].run(environments, _pack(function, args), init, timeout_s)
    failed = [outcome for outcome in outcomes if outcome.exitcode != 0]
    if failed:
        report = "\n".join(f"--- rank {o.rank}, exit code {o.exitcode}\n{o.text}" for o in failed)
        raise AssertionError(f"{len(failed)} of {size} ranks failed\n{report}")
    return [outcome.value for outcome in outcomes]


def on_ranks(
    size: int = 0, returns: list[Any] | None = None, given: Sequence[str] = (), **options: Any
) -> Callable[..., Callable[..., None]]:
    """Return a decorator that has a test run on ranks, each of which calls it; see ``run_ranks``.

    Args:
        size: number of ranks; without it the test has a parameter ``ranks`` more.
        returns: what the ranks must return, in their order.
        given: options that are parameters or fixtures of the test; ``backend``, one of Keras, stands for a framework.
        **options: of ``run_ranks``.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            ranks = size or arguments.pop("ranks")
            more = {name: arguments.pop(name) for name in given}
            if "backend" in more:
                more["framework"] = f"keras-{more.pop('backend')}"
            results = run_ranks(ranks, function, *arguments.values(), **options, **more)
            assert returns is None or results == returns

        own = inspect.signature(function)
        names = [*given] if size else ["ranks", *given]
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])
        del test.__wrapped__  # type: ignore[attr-defined]  # else pytest would not see that this starts processes
        return test

    return decorate
