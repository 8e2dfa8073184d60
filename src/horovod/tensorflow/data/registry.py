"""Registry of a data service: its parts find each other in the shared table of a separate job service.

The compute job serves it; the key is in the configuration file. A process without the key gets no answer and
has no effect; see ``rendezvous.service``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from horovod.errors import LaunchError
from horovod.rendezvous.client import JobStore
from horovod.rendezvous.interfaces import endpoint

__all__ = ["ComputeClient"]

#: Interval in seconds at which a worker checks that the registry still exists.
_LOOK_S = 10.0


class ComputeClient:
    """Registers and looks up dispatchers and workers of a data service.

    Args:
        addresses: hosts and ports of the registry; the first one that answers is used.
        key: secret key of the service.
        dispatchers: number of dispatchers.
        workers_per_dispatcher: number of workers of each dispatcher.
        timeout_s: seconds to wait for an answer.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        key: bytes,
        dispatchers: int,
        workers_per_dispatcher: int,
        timeout_s: float = 60.0,
    ) -> None:
        self._endpoints = [endpoint(host, port) for host, port in addresses]
        self._key, self._timeout_s = key, timeout_s
        self._dispatchers, self._workers = dispatchers, workers_per_dispatcher

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register the address of a dispatcher.

        Args:
            dispatcher_id: number of the dispatcher, from 0.
            dispatcher_address: its address, such as ``grpc://localhost:5000``.

        Raises:
            LaunchError: another address is registered already, or the registry does not answer.
            ValueError: there is no such dispatcher.
        """
        key = self._dispatcher(dispatcher_id)
        with self._store() as store:
            if store.add(f"{key}/count", 1) > 1 and (known := store.get(key).decode()) != dispatcher_address:
                raise LaunchError(f"dispatcher {dispatcher_id} is registered already, at {known}")
            store.set(key, dispatcher_address.encode())

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout_s: float) -> str:
        """Wait until a dispatcher is registered, and return its address.

        Args:
            dispatcher_id: number of the dispatcher, from 0.
            timeout_s: seconds to wait.

        Raises:
            LaunchError: the dispatcher did not register in time.
            ValueError: there is no such dispatcher.
        """
        return self._wait([self._dispatcher(dispatcher_id)], timeout_s, f"dispatcher {dispatcher_id} did not register")

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker.

        Args:
            dispatcher_id: number of its dispatcher.
            worker_id: number of the worker, counted over all dispatchers.
        """
        key = f"{self._dispatcher(dispatcher_id)}/worker/{worker_id % self._workers}"
        with self._store() as store:
            store.set(key, b"here")

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout_s: float) -> None:
        """Wait until all workers of a dispatcher are registered.

        Args:
            dispatcher_id: number of the dispatcher, from 0.
            timeout_s: seconds to wait.

        Raises:
            LaunchError: some workers did not register in time.
        """
        keys = [f"{self._dispatcher(dispatcher_id)}/worker/{worker}" for worker in range(self._workers)]
        self._wait(
            keys, timeout_s, f"not all of the {self._workers} workers of dispatcher {dispatcher_id} did register"
        )

    def shutdown(self) -> None:
        """End the data service."""
        with self._store() as store:
            store.set("shutdown", b"now")

    def wait_for_shutdown(self) -> None:
        """Wait until a client ends the data service, or the registry is gone."""
        with contextlib.suppress(LaunchError), self._store() as store:
            while not store.check("shutdown"):
                with contextlib.suppress(TimeoutError):
                    store.get("shutdown", _LOOK_S)

    def _dispatcher(self, index: int) -> str:
        if not 0 <= index < self._dispatchers:
            raise ValueError(f"dispatcher must be from 0 to {self._dispatchers - 1}; received {index}")
        return f"dispatcher/{index}"

    @contextlib.contextmanager
    def _store(self) -> Iterator[JobStore]:
        """Yield the shared table.

        Raises:
            LaunchError: the registry does not answer, or the connection broke.
        """
        try:
            with contextlib.closing(JobStore(self._key, lambda: self._endpoints, timeout_s=self._timeout_s)) as store:
                yield store
        except OSError:
            places = ", ".join(self._endpoints)
            raise LaunchError(f"no data service answers at {places}; see whether the compute job runs") from None

    def _wait(self, keys: Sequence[str], timeout_s: float, failure: str) -> str:
        """Wait until all keys have values; return the value of the first key."""
        with self._store() as store:
            try:
                store.wait(keys, timeout_s)
                return store.get(keys[0]).decode()
            except TimeoutError:
                text = f"{failure} within {timeout_s:g} s; see whether the compute job runs, or raise timeout"
                raise LaunchError(text) from None
