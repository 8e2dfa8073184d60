"""Several addresses of one place, tried side by side: the first that shows the job's key is taken."""

from __future__ import annotations

import socket as sockets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from horovod.errors import InitError
from horovod.rendezvous import curve
from horovod.rendezvous.interfaces import endpoint
from horovod.rendezvous.offers import MAX_BYTES
from horovod.rendezvous.waiting import Reminder

__all__ = ["Patience", "candidates_of", "connect_first"]

_LOOK_S, _RESOLVE_S = 0.1, 1.0


@dataclass(frozen=True)
class Patience:
    """How long to wait, and what ends the waiting before.

    Attributes:
        deadline: on the monotonic clock.
        total_s: seconds, for messages.
        check: raises when there is nothing to wait for any more.
    """

    deadline: float
    total_s: float
    check: Callable[[], None]
    _reminder: list[Reminder] = field(default_factory=list)

    def remind(self, missing: str) -> None:
        """Log every 30 s whom this process waits for.

        Args:
            missing: who is missing, and what they have not done yet.
        """
        if not self._reminder:
            self._reminder.append(Reminder(self.total_s))
        self._reminder[0].look(lambda: missing)

    def poll(self, socket: zmq.Socket[bytes], events: int = zmq.POLLIN) -> bool:
        """Wait for a moment, or until a socket is ready; whether there is time left, or it is."""
        left = self.deadline - time.monotonic()
        is_ready = bool(socket.poll(int(max(0.0, min(_LOOK_S, left)) * 1000), events))
        self.check()
        return is_ready or left > 0


def candidates_of(places: Sequence[str], ports: Sequence[int]) -> list[str]:
    """Return the endpoints to try.

    Args:
        places: endpoints, or names of hosts where there are ports.
        ports: on each of the hosts.
    """
    if not ports:
        return list(places)
    found: list[str] = []
    for place in places:
        try:
            known = sockets.getaddrinfo(place, None, type=sockets.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue  # not known yet, perhaps
        addresses = dict.fromkeys(str(address[0]) for *_, address in known)
        found += [endpoint(address, port) for address in addresses for port in ports]
    return found


def connect_first(
    context: zmq.Context[zmq.Socket[bytes]],
    key: bytes,
    candidates: Callable[[], Sequence[str]],
    patience: Patience,
    nobody: str,
) -> tuple[zmq.Socket[bytes], str]:
    """Connect to the first of several addresses where somebody with the key answers.

    Args:
        context: where to make sockets.
        key: of both ends.
        candidates: tells the endpoints; asked again as long as there is none that answers.
        patience: how long to try.
        nobody: what to say when nobody answers.

    Returns:
        A DEALER that is connected, and its endpoint.

    Raises:
        InitError: nobody answered in time.
    """
    probes: dict[zmq.Socket[bytes], str] = {}
    poller = zmq.Poller()
    chosen: zmq.Socket[bytes] | None = None
    again_at = 0.0
    try:
        while True:
            if time.monotonic() >= again_at:
                again_at = time.monotonic() + _RESOLVE_S
                for where in set(candidates()) - set(probes.values()):
                    probe = curve.client_socket(context, key, max_bytes=MAX_BYTES)
                    probes[probe] = where
                    probe.connect(where)
                    poller.register(probe, zmq.POLLOUT)
            patience.check()
            patience.remind(f"an answer: {nobody}")
            left = patience.deadline - time.monotonic()
            for ready, _ in poller.poll(int(max(0.0, min(_LOOK_S, left)) * 1000)):
                chosen = ready
                return ready, probes[ready]
            if left <= 0:
                raise InitError(f"{nobody} (waited {patience.total_s:g} s, HOROVOD_START_TIMEOUT)")
    finally:
        for probe in probes:
            if probe is not chosen:
                probe.close()
