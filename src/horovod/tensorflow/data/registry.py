"""Where the parts of a data service find each other: a small server in the compute job, which knows who is where.

    server to client   nonce
    client to server   question, signed with the key over nonce and question
    server to client   answer, signed with the key over nonce, question and answer

Both are JSON of fixed types. Who does not have the key gets no answer, and has no effect.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from horovod.errors import LaunchError

__all__ = ["ComputeClient", "ComputeService"]

_NONCE, _DIGEST, _MAX_BYTES = 16, 32, 1 << 16
_LENGTH = struct.Struct("!I")
#: A client that says nothing is dropped after so long; so long does an answer take at most beyond its timeout.
_SILENCE_S = 10.0


class _Question(msgspec.Struct, array_like=True):
    """What a client wants: ``action`` with a number, a text, and seconds to wait."""

    action: str
    index: int = 0
    text: str = ""
    timeout_s: float = 0.0


class _Answer(msgspec.Struct, array_like=True):
    """What it gets: a text, or why not."""

    text: str = ""
    error: str = ""


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(_LENGTH.pack(len(part)) + part for part in parts), hashlib.sha256).digest()


def _send(stream: socket.socket, payload: bytes, digest: bytes) -> None:
    stream.sendall(_LENGTH.pack(len(payload)) + digest + payload)


def _receive(stream: socket.socket) -> tuple[bytes, bytes]:
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    if length > _MAX_BYTES:
        raise ConnectionError(f"a message of {length} bytes is too long")
    digest = _read(stream, _DIGEST)
    return _read(stream, length), digest


def _read(stream: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = stream.recv(count - len(parts))
        if not part:
            raise ConnectionError("the connection was closed")
        parts += part
    return parts


class ComputeService:
    """Knows the dispatchers and workers of a data service.

    Args:
        dispatchers: how many there will be.
        workers_per_dispatcher: how many each will have.
        key: who has it is answered.
        host: where to listen.
    """

    def __init__(self, dispatchers: int, workers_per_dispatcher: int, key: bytes, host: str = "127.0.0.1") -> None:
        self._dispatchers = dispatchers
        self._workers_per_dispatcher = workers_per_dispatcher
        self._key = key
        self._changed = threading.Condition()
        self._addresses: dict[int, str] = {}
        self._workers: dict[int, set[int]] = collections.defaultdict(set)
        self._is_over = False
        service = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                service._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A connection that broke, or somebody without the key."""

        self._server = Server((host, 0), Handler)
        #: Host and port where it is reached.
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._server.serve_forever, name="horovod-compute-service", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, stream: socket.socket) -> None:
        stream.settimeout(_SILENCE_S)
        nonce = secrets.token_bytes(_NONCE)
        stream.sendall(nonce)
        payload, digest = _receive(stream)
        if not hmac.compare_digest(digest, _sign(self._key, nonce, payload)):
            return
        try:
            answer = _Answer(self._act(msgspec.json.decode(payload, type=_Question)))
        except Exception as error:
            answer = _Answer(error=str(error))
        reply = msgspec.json.encode(answer)
        _send(stream, reply, _sign(self._key, nonce, payload, reply))

    def _act(self, question: _Question) -> str:
        index, within = question.index, question.timeout_s
        with self._changed:
            if "shutdown" not in question.action and not 0 <= index < self._dispatchers:
                raise ValueError(f"there are dispatchers 0 to {self._dispatchers - 1}. Received: {index}")
            if question.action == "dispatcher":
                known = self._addresses.setdefault(index, question.text)
                if known != question.text:
                    raise ValueError(f"dispatcher {index} is registered already, at {known}")
            elif question.action == "worker":
                self._workers[index].add(int(question.text))
            elif question.action == "wait dispatcher":
                self._wait(lambda: index in self._addresses, within, f"dispatcher {index} did not register")
                return self._addresses[index]
            elif question.action == "wait workers":
                wanted = self._workers_per_dispatcher
                what = f"not all of the {wanted} workers of dispatcher {index} did register"
                self._wait(lambda: len(self._workers[index]) >= wanted, within, what)
            elif question.action == "shutdown":
                self._is_over = True
            elif question.action == "wait shutdown":
                return str(self._changed.wait_for(lambda: self._is_over, within))
            else:
                raise ValueError(f"unknown action {question.action!r}")
            self._changed.notify_all()
        return ""

    def _wait(self, condition: Callable[[], bool], timeout_s: float, failure: str) -> None:
        if not self._changed.wait_for(condition, timeout_s):
            raise TimeoutError(f"{failure} within {timeout_s:g} s; see whether the compute job runs, or raise timeout")


class ComputeClient:
    """Talks to a ``ComputeService``.

    Args:
        addresses: where it may be; the first that answers is taken.
        key: that of the service.
        timeout_s: how long to wait for a connection.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], key: bytes, timeout_s: float = 60.0) -> None:
        self._addresses = [(host, int(port)) for host, port in addresses]
        self._key = key
        self._timeout_s = timeout_s

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Say where a dispatcher is.

        Args:
            dispatcher_id: its number.
            dispatcher_address: such as ``grpc://localhost:5000``.
        """
        self._ask(_Question("dispatcher", dispatcher_id, dispatcher_address))

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout_s: float) -> str:
        """Return where a dispatcher is.

        Args:
            dispatcher_id: its number.
            timeout_s: how long to wait for it.

        Raises:
            LaunchError: it did not come.
        """
        return self._ask(_Question("wait dispatcher", dispatcher_id, timeout_s=timeout_s))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Say that a worker is there.

        Args:
            dispatcher_id: number of its dispatcher.
            worker_id: its own.
        """
        self._ask(_Question("worker", dispatcher_id, str(worker_id)))

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout_s: float) -> None:
        """Wait until a dispatcher has all of its workers.

        Args:
            dispatcher_id: its number.
            timeout_s: how long to wait for them.

        Raises:
            LaunchError: they did not come.
        """
        self._ask(_Question("wait workers", dispatcher_id, timeout_s=timeout_s))

    def shutdown(self) -> None:
        """End the data service."""
        self._ask(_Question("shutdown"))

    def wait_for_shutdown(self) -> None:
        """Wait until somebody ends the data service, or the service is gone."""
        while True:
            try:
                if self._ask(_Question("wait shutdown", timeout_s=_SILENCE_S)) == "True":
                    return
            except (OSError, LaunchError):
                return

    def _ask(self, question: _Question) -> str:
        problem: Exception | None = None
        deadline = time.monotonic() + self._timeout_s
        for host, port in self._addresses:
            try:
                with socket.create_connection((host, port), max(0.1, deadline - time.monotonic())) as stream:
                    stream.settimeout(question.timeout_s + _SILENCE_S)
                    return self._converse(stream, question)
            except OSError as error:
                problem = error
        places = ", ".join(f"{host}:{port}" for host, port in self._addresses)
        raise LaunchError(f"no data service answers at {places} ({problem}); see whether the compute job runs")

    def _converse(self, stream: socket.socket, question: _Question) -> str:
        nonce = _read(stream, _NONCE)
        payload = msgspec.json.encode(question)
        _send(stream, payload, _sign(self._key, nonce, payload))
        reply, digest = _receive(stream)
        if not hmac.compare_digest(digest, _sign(self._key, nonce, payload, reply)):
            raise LaunchError("somebody else answers in place of the data service: its key is another one")
        answer = msgspec.json.decode(reply, type=_Answer)
        if answer.error:
            raise LaunchError(answer.error)
        return answer.text
