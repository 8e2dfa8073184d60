"""Watches the other workers through idle connections, which end when their worker ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from khorovod_ipu.tensorflow.cluster import Cluster

__all__ = ["WorkerLostError", "WorkerWatch"]

#: Seconds between two attempts to reach a missing worker.
_PAUSE_S = 0.1
#: Seconds between warnings that name the missing workers.
_REMIND_S = 10.0
#: Maximum seconds that the end of the process waits for a watch that is checking a worker.
_END_S = 10.0

_logger = logging.getLogger("horovod")


class WorkerLostError(RuntimeError):
    """A worker died, or never started."""


class WorkerWatch:
    """Watches the servers of the other workers, once it has reached them.

    Args:
        cluster: the workers.
        on_loss: called once, on a thread of the watch, with the description of the lost worker.
    """

    def __init__(self, cluster: Cluster, on_loss: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._on_loss = on_loss
        self._connections: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._lost: dict[int, str] = {}
        self._wake, self._woken = os.pipe()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def wait_for_all(self, timeout_s: float) -> bool:
        """Wait until every worker's server has been reached; then watch them.

        Args:
            timeout_s: seconds to wait, for all workers together.

        Returns:
            Whether this was the first call.

        Raises:
            WorkerLostError: a worker's server was not reached in time.
        """
        with self._lock:
            if self._thread is not None or self._cluster.size == 1:
                return False
            deadline = time.monotonic() + timeout_s
            told = time.monotonic()
            missing = [rank for rank in range(self._cluster.size) if rank != self._cluster.rank]
            while missing:
                for rank in missing:
                    connection = self._connect(rank, max(0.05, min(1.0, deadline - time.monotonic())))
                    if connection is not None:
                        self._connections[rank] = connection
                missing = [rank for rank in missing if rank not in self._connections]
                if missing and time.monotonic() - told > _REMIND_S:
                    told = time.monotonic()
                    _logger.warning("waiting for %s, for %.0f s more", self._names(missing), max(0.0, deadline - told))
                if missing and time.monotonic() > deadline:
                    raise WorkerLostError(self._missing(missing, timeout_s))
                if missing:
                    threading.Event().wait(_PAUSE_S)
            # A thread that runs during TensorFlow's shutdown would close sessions that no longer exist.
            atexit.register(self.close)
            self._thread = threading.Thread(target=self._run, name="khorovod-ipu-workers", daemon=True)
            self._thread.start()
            return True

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(self._cluster.describe(rank) for rank in ranks)

    def _missing(self, ranks: list[int], timeout_s: float) -> str:
        return (
            f"{self._names([self._cluster.rank])}, this worker, waited {timeout_s:g} s for {self._names(ranks)}: "
            "no server listens there. Start it with the same TF_CONFIG and its own index, and check the network. "
            "HOROVOD_START_TIMEOUT sets the limit in seconds"
        )

    def _connect(self, rank: int, timeout_s: float) -> socket.socket | None:
        host, _, port = self._cluster.addresses[rank].rpartition(":")
        try:
            made = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        except OSError:
            return None
        if made.getsockname() == made.getpeername():
            # No server listens, and the kernel chose the same port for this end: TCP connected to itself.
            made.close()
            return None
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return made

    def lost(self, within_s: float = 0.0) -> str:
        """Return the description of the lost workers, or an empty string.

        Args:
            within_s: seconds to wait for the first loss: an error of gRPC may be faster than the watch.
        """
        deadline = time.monotonic() + within_s
        while not self._lost and self._thread is not None and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        return "; ".join(self._lost.values())

    def close(self) -> None:
        """Stop watching: no more workers are reported as lost."""
        atexit.unregister(self.close)
        thread, self._thread = self._thread, None
        self._is_closed = True
        if thread is not None:
            os.write(self._woken, b"x")
            thread.join(_END_S)
        if thread is not None and thread.is_alive():
            return  # the callback closes a session that does not end, and the process exits
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _run(self) -> None:
        while self._connections:
            by_descriptor = {made.fileno(): rank for rank, made in self._connections.items()}
            poller = select.poll()
            for descriptor in (*by_descriptor, self._wake):
                poller.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._wake in ready:
                return
            for descriptor in ready:
                self._look(by_descriptor[descriptor])

    def _look(self, rank: int) -> None:
        connection = self._connections[rank]
        with contextlib.suppress(OSError):
            if connection.recv(4096):
                return  # gRPC's greeting
        # A server may end an idle connection. The worker is lost only if no server answers.
        connection.close()
        again = self._connect(rank, 5.0)
        if again is not None:
            self._connections[rank] = again
            return
        if self._is_closed:
            return
        del self._connections[rank]
        first = not self._lost
        self._lost[rank] = (
            f"{self._cluster.describe(rank)} was lost: its server is gone. The process died, or ended "
            "before this one: with fewer batches, for instance"
        )
        if first:
            self._on_loss(self._lost[rank])
