"""Ranks on the workers of a Dask cluster: ``run`` calls a function on one rank per worker process."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from horovod import context
from horovod.config import JOB_ID, MEETING, SECRET_KEY
from horovod.errors import LaunchError, PeerLostError
from horovod.launch.plan import rank_variables
from horovod.phrases import few
from horovod.rendezvous.client import JobStore
from horovod.rendezvous.interfaces import own_addresses
from horovod.rendezvous.service import Service

__all__ = ["run"]

#: How often to look whether a worker has gone; how long the rank that made others fail may take to fail itself.
_LOOK_S, _CAUSE_S = 1.0, 2.0


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    client: Any = None,
    num_proc: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ranks that train together, one in each worker process of a Dask cluster.

    The key of the job travels with Dask's own messages: use its TLS where strangers can read the network.

    Args:
        func: what to call; it calls ``hvd.init()`` itself, and runs in a thread of the worker.
        args: its arguments.
        kwargs: its named arguments.
        client: a ``distributed.Client``; the current one when omitted.
        num_proc: number of ranks; as many as there are workers when omitted.

    Returns:
        The return value of ``func`` on each rank, in rank order.

    Raises:
        LaunchError: there are too few workers, or one was lost; no rank runs a second time.
        Exception: as ``func`` raised it on the first rank that failed.

    Blocks until all ranks have returned.
    """
    import distributed

    client = distributed.get_client() if client is None else client
    workers = sorted(client.nthreads(), key=lambda address: (urlsplit(address).hostname or "", address))
    hosts = [urlsplit(address).hostname for address in workers]
    if None in hosts:
        raise LaunchError("ranks need processes of their own: start the cluster with processes=True")
    if not 0 < (size := len(workers) if num_proc is None else num_proc) <= len(workers):
        raise LaunchError(
            f"num_proc={num_proc}, and the Dask cluster has {len(workers)} workers: one rank runs on each"
        )
    workers, names = workers[:size], [str(host) for host in hosts[:size]]
    places = list(dict.fromkeys(names))
    counts = [names.count(name) for name in places]
    key = secrets.token_hex(32)
    service = Service(bytes.fromhex(key), [*own_addresses(), "127.0.0.1"], hosts=names)
    common = {JOB_ID: secrets.token_hex(16), SECRET_KEY: key, MEETING: ",".join(service.endpoints)}
    futures: list[Any] = []
    try:
        for rank, worker in enumerate(workers):
            host = places.index(names[rank])
            own = rank_variables(names[rank], counts, host, rank - sum(counts[:host]))
            futures.append(
                client.submit(
                    _rank, {**common, **own}, rank, service.endpoints, func, tuple(args), dict(kwargs or {}),
                    workers=[worker], allow_other_workers=False, pure=False, retries=0, key=f"horovod-{key[:8]}-{rank}",
                )
            )  # fmt: skip
        _wait(client, futures, workers, service)
        found: list[Any] = client.gather(futures)
        return found
    finally:
        client.cancel(futures)
        service.close()


def _wait(client: Any, futures: Sequence[Any], workers: Sequence[str], service: Service) -> None:
    """Return when all ranks have returned; raise what ended the first that failed."""
    import distributed

    waiting = dict(enumerate(futures))
    who = [f"rank {rank} on worker {worker}" for rank, worker in enumerate(workers)]
    while waiting:
        try:
            distributed.wait(list(waiting.values()), timeout=_LOOK_S, return_when="FIRST_COMPLETED")
        except (TimeoutError, distributed.TimeoutError):
            here = client.nthreads()
            if lost := [rank for rank in waiting if workers[rank] not in here]:
                for rank in lost:
                    service.ended(rank, who[rank], "was lost")
                gone = few([who[rank] for rank in lost])
                raise LaunchError(f"Dask lost {gone}; its log says why. The other ranks have ended, too") from None
        failed = [rank for rank, future in waiting.items() if future.status == "error"]
        for rank in failed:
            service.ended(rank, who[rank], "failed")
        if failed:
            _raise_cause(futures)
        waiting = {rank: future for rank, future in waiting.items() if not future.done()}


def _raise_cause(futures: Sequence[Any]) -> None:
    """Raise the error of a rank that did not fail because of another one, if one comes soon."""
    import distributed

    with contextlib.suppress(TimeoutError, distributed.TimeoutError):
        distributed.wait(futures, timeout=_CAUSE_S)
    errors = [future.exception() for future in futures if future.status == "error"]
    raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])


def _rank(
    variables: Mapping[str, str], rank: int, endpoints: Sequence[str], func: Callable[..., Any],
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """On a worker: be a rank, once."""
    store = JobStore(bytes.fromhex(variables[SECRET_KEY]), lambda: endpoints)
    try:
        # Dask runs the tasks of a lost worker again, and the others have ended by then.
        if store.add(f"dask/{rank}", 1) > 1:
            raise LaunchError(f"rank {rank} has run before, on a worker that was lost: call horovod.dask.run again")
    finally:
        store.close()
    if SECRET_KEY in os.environ:
        raise LaunchError("this worker is a rank of another job already; wait for that one, or start more workers")
    os.environ.update(variables)
    try:
        return func(*args, **kwargs)
    finally:
        context.shutdown()
        for name in variables:
            os.environ.pop(name, None)
