"""A job of fixed size whose ranks run in processes of another system, such as Dask, Ray or Spark.

That system starts the processes, watches them, and carries function and results. This module makes the environment of
each process, and tells the ranks which of them have ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from horovod.config import JOB_ID, MEETING, SECRET_KEY
from horovod.errors import PeerLostError
from horovod.launch.plan import rank_variables
from horovod.rendezvous.interfaces import own_addresses
from horovod.rendezvous.service import Service

__all__ = ["WorkerJob", "first_cause", "in_rank_order", "listen_addresses"]

W = TypeVar("W")


def in_rank_order(workers: Iterable[W], host_of: Callable[[W], str]) -> list[W]:
    """Return the workers in rank order: those of one host follow each other; otherwise their system's order is kept."""
    found: dict[str, list[W]] = {}
    for worker in workers:
        found.setdefault(host_of(worker), []).append(worker)
    return [worker for group in found.values() for worker in group]


def first_cause(errors: Sequence[BaseException]) -> BaseException:
    """Return the first error that is not the loss of another rank; else the first error."""
    return next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])


def listen_addresses(interfaces: Sequence[str] = ()) -> list[str]:
    """Return the addresses at which the job service of this process listens, for other hosts and for this one; at all
    interfaces when none is given.

    Raises:
        InitError: an interface does not exist, or has no address.
    """
    return list(dict.fromkeys([*own_addresses(interfaces), "127.0.0.1"]))


class WorkerJob:
    """One job: the environment of its ranks, and the service at which they meet.

    Args:
        hosts: name of the host of each rank, as ``in_rank_order`` has them; processes of one name must be on one host.
        settings: more variables for all ranks, such as HOROVOD_TIMELINE.
        interfaces: network interfaces of this host at which the ranks find the service; all when empty.

    Raises:
        InitError: an interface does not exist, or has no address.
        OSError: the service cannot listen at any address.
    """

    def __init__(
        self, hosts: Sequence[str], settings: Mapping[str, str] | None = None, interfaces: Sequence[str] = ()
    ) -> None:
        key = secrets.token_hex(32)
        self._service = Service(bytes.fromhex(key), listen_addresses(interfaces), hosts=hosts)
        names = list(dict.fromkeys(hosts))
        counts = [list(hosts).count(name) for name in names]
        meeting = ",".join(self._service.endpoints)
        common = {**(settings or {}), JOB_ID: secrets.token_hex(16), SECRET_KEY: key, MEETING: meeting}
        places = [(at, local_rank) for at, count in enumerate(counts) for local_rank in range(count)]
        # environment variables that each rank needs before `hvd.init()`, by rank
        self.variables: list[dict[str, str]] = [
            {**common, **rank_variables(names[at], counts, at, local_rank)} for at, local_rank in places
        ]

    def ended(self, rank: int, who: str, how: str) -> None:
        """Tell the other ranks that a rank has ended before its work was done, and how, in words.

        May be called in any thread; never blocks.
        """
        self._service.ended(rank, who, how)

    def close(self) -> None:
        """End the service. Blocks for two seconds at most."""
        self._service.close()
