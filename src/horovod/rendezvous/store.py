"""A table of a job that all its ranks read and write: engines between hosts tell each other there where they listen.

It lives in the process of rank 0, which listens on a socket of ``rendezvous.curve``: who has not the job's secret is
not heard. Values are bytes, and are not looked into.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
import zmq

from horovod.errors import InitError
from horovod.logs import logger
from horovod.rendezvous.curve import client_socket, server_socket, terminate

__all__ = ["StoreClient", "StoreServer", "local_address"]

_MAX_BYTES = 4 << 20
#: How often a client looks whether it has been closed.
_SLICE_MS = 100
Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Key = Annotated[str, msgspec.Meta(max_length=4096)]


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    """What a client wants; ``get`` is answered as soon as there is a value."""

    number: int
    verb: Literal["set", "get", "add", "check", "delete", "hello"]
    key: Key = ""
    value: bytes = b""
    amount: int = 0


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """``amount`` is a sum, or whether there was such a key."""

    number: int
    value: bytes = b""
    amount: int = 0


_encoder = msgspec.msgpack.Encoder()
_asks, _answers = msgspec.msgpack.Decoder(_Ask), msgspec.msgpack.Decoder(_Answer)


def local_address(key: bytes, job: str, number: int) -> str:
    """Return where the store of a job on one host listens: a name that only its ranks can tell, and no file.

    Args:
        key: the job's secret.
        job: its name on this host.
        number: of the meeting.
    """
    text = f"store {job} {number}".encode(errors="surrogatepass")
    return f"ipc://@horovod-{hmac.digest(key, text, 'sha256').hex()[:32]}"


class StoreServer:
    """Holds the table, in a thread of its own.

    Args:
        secret: the job's secret.
        addresses: where to listen, such as ``tcp://10.0.0.1:*``; one that cannot be had is left out.

    Attributes:
        endpoints: where it listens.

    Raises:
        InitError: it can listen nowhere.
    """

    def __init__(self, secret: bytes, addresses: Sequence[str]) -> None:
        self._context: Context = zmq.Context()
        self._values: dict[str, bytes] = {}
        self._parked: dict[str, list[tuple[bytes, int]]] = collections.defaultdict(list)
        self.endpoints: list[str] = []
        try:
            self._socket = server_socket(self._context, secret, max_bytes=_MAX_BYTES)
            self._socket.router_mandatory = False
            troubles = [trouble for address in addresses if (trouble := self._bind(address))]
            if not self.endpoints:
                raise InitError(f"rank 0 can listen nowhere for the other ranks: {'; '.join(troubles)}")
            self._bell = self._context.socket(zmq.PAIR)
            self._bell.bind("inproc://horovod-store")
            self._stop = self._context.socket(zmq.PAIR)
            self._stop.connect("inproc://horovod-store")
            self._thread = threading.Thread(target=self._run, name="horovod-store", daemon=True)
            self._thread.start()
        except BaseException:
            terminate(self._context)
            raise

    def _bind(self, address: str) -> str:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            return f"{address}: {error.strerror}"
        found = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(found, bytes)
        port = found.decode().rstrip("\0").rpartition(":")[2]
        self.endpoints.append(f"{address[:-1]}{port}" if address.endswith(":*") else address)
        return ""

    def close(self) -> None:
        """Forget everything, and listen no more."""
        with contextlib.suppress(zmq.ZMQError):
            self._stop.send(b"")
        self._thread.join()
        terminate(self._context)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                return
            client, *frames = self._socket.recv_multipart()
            try:
                (frame,) = frames
                self._answer(client, _asks.decode(frame))
            except (ValueError, msgspec.DecodeError):
                # It has the key, so it is no stranger: a rank with another version, most likely.
                logger.warning("the store of this job was sent what is no question to it; it has no effect")

    def _answer(self, client: bytes, ask: _Ask) -> None:
        values, key = self._values, ask.key
        if ask.verb == "set":
            self._put(key, ask.value)
            self._send(client, _Answer(ask.number))
        elif ask.verb == "get":
            if key in values:
                self._send(client, _Answer(ask.number, values[key]))
            else:
                self._parked[key].append((client, ask.number))
        elif ask.verb == "add":
            found = values.get(key, b"0")
            total = (int(found) if found.lstrip(b"-").isdigit() else 0) + ask.amount
            self._put(key, str(total).encode())
            self._send(client, _Answer(ask.number, amount=total))
        elif ask.verb == "check":
            self._send(client, _Answer(ask.number, amount=int(key in values)))
        elif ask.verb == "delete":
            self._send(client, _Answer(ask.number, amount=int(values.pop(key, None) is not None)))
        else:
            self._send(client, _Answer(ask.number))

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for client, number in self._parked.pop(key, ()):
            self._send(client, _Answer(number, value))

    def _send(self, client: bytes, answer: _Answer) -> None:
        # Who does not read its answers loses them, and is no trouble to anybody else.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([client, _encoder.encode(answer)], zmq.NOBLOCK)


class StoreClient:
    """One rank's way to the store; for any thread.

    Args:
        secret: the job's secret.
        endpoints: where the store may be reached; tried side by side, and the first that answers is taken.
        timeout_s: for how long to wait for anything, unless a call says otherwise.
        check: called now and then while this rank looks for the store; what it raises ends that.
        server: what is closed together with this.

    Attributes:
        endpoint: which of them it was.

    Raises:
        TimeoutError: none of them answered.
    """

    def __init__(
        self,
        secret: bytes,
        endpoints: Sequence[str],
        timeout_s: float = 30.0,
        check: Callable[[], None] = lambda: None,
        server: StoreServer | None = None,
    ) -> None:
        self._server = server
        self._context: Context = zmq.Context()
        self._lock = threading.Lock()
        self._number = secrets.randbits(32)
        self._is_closed = False
        self.timeout_s = timeout_s
        try:
            self._socket, self.endpoint = self._connect(secret, endpoints, check)
        except BaseException:
            terminate(self._context)
            raise

    def _connect(self, secret: bytes, endpoints: Sequence[str], check: Callable[[], None]) -> tuple[Socket, str]:
        poller = zmq.Poller()
        tried: dict[Socket, str] = {}
        for endpoint in dict.fromkeys(endpoints):
            socket = client_socket(self._context, secret, max_bytes=_MAX_BYTES)
            socket.connect(endpoint)
            tried[socket] = endpoint
            poller.register(socket, zmq.POLLIN | zmq.POLLOUT)
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            for socket, event in poller.poll(_SLICE_MS):
                if event & zmq.POLLIN:
                    socket.recv()
                    for other in tried:
                        if other is not socket:
                            other.close()
                    return socket, tried[socket]
                socket.send(_encoder.encode(_Ask(self._number, "hello")))
                poller.modify(socket, zmq.POLLIN)
            check()
        raise TimeoutError(f"the store of rank 0 did not answer within {self.timeout_s:g} s: {', '.join(endpoints)}")

    def set(self, key: str, value: bytes) -> None:
        """Let ``key`` have ``value``, for all ranks."""
        self._ask("set", key, value=value)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value of ``key``, as soon as some rank has set it.

        Args:
            key: which.
            timeout_s: seconds, at most.

        Raises:
            TimeoutError: nobody has.
            ConnectionError: the client was closed meanwhile.
        """
        return self._ask("get", key, timeout_s=timeout_s).value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        return self._ask("add", key, amount=amount).amount

    def check(self, key: str) -> bool:
        """Return whether ``key`` has a value."""
        return bool(self._ask("check", key).amount)

    def delete(self, key: str) -> bool:
        """Forget ``key``; return whether it had a value."""
        return bool(self._ask("delete", key).amount)

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Block until all ``keys`` have values.

        Args:
            keys: which.
            timeout_s: seconds, at most, for all of them.

        Raises:
            TimeoutError: one has none.
            ConnectionError: the client was closed meanwhile.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        for key in keys:
            self._ask("get", key, timeout_s=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Close the connection; who waits for a value in another thread gets a ConnectionError."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._lock:
            terminate(self._context)
        if self._server is not None:
            self._server.close()

    def _ask(
        self, verb: str, key: str, value: bytes = b"", amount: int = 0, timeout_s: float | None = None
    ) -> _Answer:  # fmt: skip
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self._lock.acquire(timeout=_SLICE_MS / 1e3):
            self._look(verb, key, deadline, limit_s)
        try:
            self._number += 1
            frame = _encoder.encode([self._number, verb, key, value, amount])
            while not self._socket.poll(_SLICE_MS, zmq.POLLOUT):
                self._look(verb, key, deadline, limit_s)
            self._socket.send(frame)
            while True:
                if not self._socket.poll(_SLICE_MS):
                    self._look(verb, key, deadline, limit_s)
                    continue
                answer = _answers.decode(self._socket.recv())
                # What was asked before, and waited for in vain, may still be answered.
                if answer.number == self._number:
                    return answer
        except zmq.ZMQError as error:
            raise ConnectionError(f"the store of rank 0 cannot be asked: {error}") from None
        finally:
            self._lock.release()

    def _look(self, verb: str, key: str, deadline: float, limit_s: float) -> None:
        if self._is_closed:
            raise ConnectionError("this rank has left its job")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer of the store of rank 0 to {verb} {key!r} within {limit_s:g} s")
