"""The place where the leaders of the hosts meet: a listening socket with a thread, in horovodrun or beside rank 0.

It outlives a meeting, so that ``shutdown()`` and ``init()`` may follow each other; it only ever hears who has the job's
key.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from horovod._version import __version__
from horovod.rendezvous import curve
from horovod.rendezvous.book import Book
from horovod.rendezvous.interfaces import endpoint
from horovod.rendezvous.keys import purpose_key
from horovod.rendezvous.offers import (
    MAX_BYTES,
    Answer,
    Ask,
    Come,
    Failed,
    Gone,
    Question,
    Refusal,
    Roster,
    Waiting,
    pack,
    unpack,
    version_of,
)

__all__ = ["MeetingPoint"]

_CONTROL = "inproc://horovod-meeting-point"
_MOST_AT_ONCE = 100_000
_Letters = list[tuple[bytes, Answer]]


class MeetingPoint:
    """Where the hosts of a job meet.

    Args:
        secret: the job's secret.
        addresses: addresses of this host to listen at.
        ports: which of them to listen at, as many as are free; any one when empty.
        hosts: name of the host of each rank, by rank; empty when that is not known.

    Attributes:
        endpoints: where it can be found, several addresses of one place.

    Raises:
        OSError: it cannot listen at any of the addresses.
    """

    def __init__(
        self, secret: bytes, addresses: Sequence[str], ports: Sequence[int] = (), hosts: Sequence[str] = ()
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._book = Book(hosts)
        self._lock = threading.Lock()
        self._news: list[Callable[[Book], _Letters]] = []
        self._told = threading.Event()
        self._is_closed = False
        self._answered: collections.deque[bytes] = collections.deque(maxlen=_MOST_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="horovod-meeting-point", daemon=True)
        try:
            self._socket = curve.server_socket(self._context, purpose_key(secret, "meeting"), max_bytes=MAX_BYTES)
            self._socket.sndhwm = self._socket.rcvhwm = _MOST_AT_ONCE
            self.endpoints = listen(self._socket, addresses, ports)
            self._wake = self._context.socket(zmq.PUSH)
            self._woken = self._context.socket(zmq.PULL)
            self._woken.bind(_CONTROL)
            self._wake.connect(_CONTROL)
        except BaseException:
            curve.terminate(self._context)
            raise
        self._thread.start()

    def ended(self, rank: int, who: str, how: str) -> None:
        """Say that a rank has ended, to all who wait for it now or later.

        Args:
            rank: of the job.
            who: the same in words.
            how: what became of it.
        """
        self._enter(lambda book: book.ended(rank, who, how))

    def failed(self, failed: Failed) -> None:
        """Say that nobody of a host will come, to all who wait for it now or later."""
        self._enter(lambda book: book.failed(b"", failed))

    def await_told(self, timeout_s: float) -> bool:
        """Return whether all other hosts know that one has failed; blocks until they do, or ``timeout_s``."""
        return self._told.wait(timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether a host has failed."""
        return self._book.has_failed

    def _enter(self, news: Callable[[Book], _Letters]) -> None:
        with self._lock:
            self._news.append(news)
            if not self._is_closed:
                self._wake.send(b"")

    def close(self) -> None:
        """Let nobody meet here any more. Blocks until all have read what they were told, or two seconds."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.send(b"")
        self._thread.join()
        curve.part(self._socket, self._answered, pack(Waiting("")))
        curve.terminate(self._context)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._is_closed:
            for socket, _ in poller.poll():
                message = socket.recv_multipart()
                if socket is self._socket and len(message) == 2:
                    self._send(self._hear(*message))
            with self._lock:
                news, self._news = self._news, []
            for one in news:
                self._send(one(self._book))
            if self._book.has_told:
                self._told.set()

    def _hear(self, sender: bytes, data: bytes) -> _Letters:
        version = version_of(data)
        if version and version != __version__:
            return self._book.other_version(sender, version)
        question: Question | None = unpack(data, Come | Gone | Failed | Ask)  # type: ignore[arg-type]
        if isinstance(question, Come) and question.offer.ranks:
            return self._book.come(sender, question, time.monotonic())
        if isinstance(question, Ask):
            return [(sender, self._book.fate(question.rank))]
        if isinstance(question, Failed):
            return self._book.failed(sender, question)
        return self._book.gone(question) if isinstance(question, Gone) else []

    def _send(self, letters: _Letters) -> None:
        for receiver, answer in letters:
            self._socket.send_multipart([receiver, pack(answer)])
            if isinstance(answer, Roster | Refusal):
                self._answered.append(receiver)


def listen(socket: zmq.Socket[bytes], addresses: Sequence[str], ports: Sequence[int] = ()) -> list[str]:
    """Bind a socket to each of several addresses.

    Args:
        socket: one that is not bound.
        addresses: addresses of this host.
        ports: which to listen at, as many as are free; any one when empty.

    Returns:
        Where it listens.

    Raises:
        OSError: at none of them.
    """
    found: list[str] = []
    refused: zmq.ZMQError | None = None
    for address in addresses:
        for port in ports or ("*",):
            try:
                socket.bind(endpoint(address, port))
                found.append(
                    endpoint(address, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
                )
            except zmq.ZMQError as error:
                refused = error
    if not found:
        assert refused is not None
        raise OSError(refused.errno, f"cannot listen at {', '.join(addresses)}: {refused}")
    return found
