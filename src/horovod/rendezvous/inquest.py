"""What became of a rank that cannot be reached any more: horovodrun, where its host's agent reports, may know."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from horovod.rendezvous import curve
from horovod.rendezvous.keys import purpose_key
from horovod.rendezvous.offers import MAX_BYTES, Ask, Fate, pack, unpack

__all__ = ["Inquest"]

#: How often to ask again: the news may be on its way there.
_AGAIN_S = 0.05


class Inquest:
    """Asks the place where the hosts meet; never blocks.

    Args:
        places: where it listens, several addresses of one place.
        secret: the job's secret.
        rank: about whom to ask.
    """

    def __init__(self, places: Sequence[str], secret: bytes, rank: int) -> None:
        self._question = pack(Ask(rank))
        self._again_at = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = []
        for place in places:
            socket = curve.client_socket(self._context, purpose_key(secret, "meeting"), max_bytes=MAX_BYTES)
            self._sockets.append(socket)
            socket.connect(place)

    def news(self) -> str:
        """Return what became of the rank, such as "was killed by SIGKILL"; empty as long as that is not known."""
        is_time = time.monotonic() >= self._again_at
        for socket in self._sockets:
            if is_time and socket.poll(0, zmq.POLLOUT):
                self._again_at = time.monotonic() + _AGAIN_S
                socket.send(self._question, zmq.NOBLOCK)
            while socket.poll(0):
                answer = unpack(socket.recv(), Fate)
                if answer is not None and answer.how:
                    return answer.how
        return ""

    def close(self) -> None:
        """Ask no more."""
        curve.terminate(self._context)
