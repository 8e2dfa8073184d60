"""Workers that wait in different operations, each for the others: found out, and ended.

TensorFlow's rings wait for ever. Every worker notes in which of them it is; who has not moved for some time, and
computes nothing meanwhile, tells the others, by datagrams to the UDP port of the same number as its server's. When all
workers say so and there is no operation in which all of them are, nothing can go on any more. Where datagrams do not
arrive, no worker is ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from khorovod_ipu.tensorflow.cluster import Cluster

__all__ = ["Lookout", "WorkerProgress", "deadlocked"]

#: Of the time without a move, what a process that computes nothing may take of a processor.
_IDLE = 0.02
#: Times that a worker tells its state within its patience, and how old the others' words may be, in such times.
_TELLS, _FRESH = 4, 3
_MOST_BYTES = 8192
#: How long the end of the process waits for a lookout that looks up a name just then.
_END_S = 5.0


@dataclass
class WorkerProgress:
    """The operations of the rings that this worker is in.

    Attributes:
        calls: how often each was entered.
        inside: how many of these calls have not returned.
    """

    calls: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._move()

    def _move(self) -> None:
        self._moved, self._computed = time.monotonic(), time.process_time()

    def enter(self, operation: str) -> None:
        """Note that this worker waits for the others in an operation.

        Args:
            operation: same words on all workers.
        """
        with self._lock:
            self.calls[operation] += 1
            self.inside[operation] += 1
            self._move()

    def leave(self, operation: str) -> None:
        """Note that it is through.

        Args:
            operation: as for ``enter``.
        """
        with self._lock:
            self.inside[operation] -= 1
            self._move()

    def stuck_in(self, patience_s: float) -> dict[str, int]:
        """Return the operations that this worker is in, and in which call, if it does nothing else; else nothing.

        Args:
            patience_s: how long nothing must have moved.
        """
        with self._lock:
            still_s, computed_s = time.monotonic() - self._moved, time.process_time() - self._computed
            if still_s < patience_s or computed_s > _IDLE * still_s:
                return {}
            return {operation: self.calls[operation] for operation, count in self.inside.items() if count > 0}


def deadlocked(states: Sequence[Mapping[str, int] | None]) -> bool:
    """Return whether workers wait for each other for ever: each in something, and nowhere all of them.

    Args:
        states: of every worker, the operations that it is stuck in; None of one that has not said so.
    """
    if not all(states):
        return False
    first, *others = ({*state.items()} for state in states if state is not None)
    return bool(others) and not first.intersection(*others)


class Lookout:
    """Tells the other workers that this one is stuck, and hears it from them.

    Args:
        cluster: the workers.
        progress: of this one.
        patience_s: how long a worker that does nothing must have been stuck.
        on_deadlock: called once, on a thread of this one, with words for who waits where.
    """

    def __init__(
        self, cluster: Cluster, progress: WorkerProgress, patience_s: float, on_deadlock: Callable[[str], None]
    ) -> None:
        self._cluster, self._progress, self._on_deadlock = cluster, progress, on_deadlock
        self.patience_s = patience_s
        self._of = hashlib.sha256(json.dumps([cluster.jobs, patience_s]).encode()).hexdigest()
        self._heard: dict[int, tuple[float, dict[str, int]]] = {}
        self._wake = self._woken = -1
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Begin to listen, if the port is free."""
        port = int(self._cluster.addresses[self._cluster.rank].rpartition(":")[2])
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(("", port))
        except OSError:
            self._socket.close()
            return
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, name="khorovod-ipu-lookout", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            os.write(self._woken, b"x")
            thread.join(_END_S)
            if not thread.is_alive():
                os.close(self._wake)
                os.close(self._woken)

    def _run(self) -> None:
        assert self._socket is not None
        with self._socket as own:
            poller = select.poll()
            for descriptor in (own.fileno(), self._wake):
                poller.register(descriptor, select.POLLIN)
            told = time.monotonic()
            while True:
                pause_s = self.patience_s / _TELLS
                ready = [descriptor for descriptor, _ in poller.poll(1000 * pause_s)]
                if self._wake in ready:
                    return
                if own.fileno() in ready:
                    self._hear(own)
                if time.monotonic() - told >= pause_s:
                    told = time.monotonic()
                    if self._ends(own):
                        return

    def _hear(self, own: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            said: Any = json.loads(own.recv(_MOST_BYTES))
            if said["of"] == self._of and 0 <= int(said["rank"]) < self._cluster.size:
                state = {str(operation): int(call) for operation, call in said["in"].items()}
                self._heard[int(said["rank"])] = (time.monotonic(), state)

    def _ends(self, own: socket.socket) -> bool:
        """Tell the others where this worker is stuck; return whether all are, for ever."""
        state = self._progress.stuck_in(self.patience_s)
        if not state:
            return False
        cluster, since = self._cluster, time.monotonic() - _FRESH * self.patience_s / _TELLS
        said = json.dumps({"of": self._of, "rank": cluster.rank, "in": state}).encode()
        for rank in range(cluster.size):
            if rank != cluster.rank:
                with contextlib.suppress(OSError):
                    self._send(own, rank, said)
        heard = {rank: words for rank, (when, words) in self._heard.items() if when >= since}
        states = [state if rank == cluster.rank else heard.get(rank) for rank in range(cluster.size)]
        if not deadlocked(states):
            return False
        self._on_deadlock(self._words([each or {} for each in states]))
        return True

    def _send(self, own: socket.socket, rank: int, said: bytes) -> None:
        host, _, port = self._cluster.addresses[rank].rpartition(":")
        for family, _, _, _, address in socket.getaddrinfo(host.strip("[]"), int(port), 0, socket.SOCK_DGRAM):
            place = str(address[0])
            if own.family == socket.AF_INET6 and family == socket.AF_INET:
                place = f"::ffff:{place}"
            own.sendto(said, (place, int(port)))

    def _words(self, states: Sequence[Mapping[str, int]]) -> str:
        where = "; ".join(
            f"{self._cluster.describe(rank)} waits in "
            + ", ".join(f"{operation} (call {call})" for operation, call in list(state.items())[:3])
            for rank, state in enumerate(states)
        )
        return (
            f"the workers wait for each other for ever, each in another operation: {where}. One has fewer batches, or "
            "does something that the others do not. Found after HOROVOD_STALL_CHECK_TIME_SECONDS="
            f"{self.patience_s:g} without anything moving"
        )
