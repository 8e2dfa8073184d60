"""Sockets between hosts: ZeroMQ with CURVE, for processes that have the job's secret and no others.

A listening socket derives its key pair from the secret. A client must know its public key, which is never sent, so only
a process with the secret can compute it; the server proves its secret key in the same handshake. libzmq drops all other
connections, and ends those that have not completed the handshake after five seconds.

Source: RFC 23 (ZMTP) and 26 (CurveZMQ) of rfc.zeromq.org; zmq_curve(7), zmq_setsockopt(3).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable

import zmq
from zmq.utils import z85

__all__ = ["MAX_BYTES", "client_socket", "part", "server_socket"]

MAX_BYTES = 64 << 20
"""Size of the largest accepted message; a peer that sends a larger one is disconnected."""
#: A peer that has not shown its key within this time is cut off; one that does not answer is tried again.
_HANDSHAKE_MS, _CONNECT_MS, _RETRY_MS, _RETRY_MOST_MS = 5_000, 3_000, 50, 1_000
_BACKLOG = 1024
#: How long, and how often, to check whether the receivers of a last message have left.
_PART_S, _PART_LOOK_MS = 2.0, 5


def _server_key(secret: bytes) -> bytes:
    """Return the secret key of all listening sockets with a secret, in Z85."""
    if not secret:
        raise ValueError("a socket between hosts needs the job's secret")
    return z85.encode(hmac.digest(secret, b"horovod curve server", "sha256"))


def server_socket(
    context: zmq.Context[zmq.Socket[bytes]], secret: bytes, max_bytes: int = MAX_BYTES
) -> zmq.Socket[bytes]:
    """Return a socket to be bound, which accepts only processes with the job's secret, and only so large messages.

    Raises:
        ValueError: there is no secret.
    """
    key = _server_key(secret)
    socket = _socket(context, zmq.ROUTER, max_bytes)
    socket.curve_secretkey = key
    socket.curve_server = True
    return socket


def client_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    secret: bytes,
    max_bytes: int = MAX_BYTES,
    routing_id: bytes = b"",
) -> zmq.Socket[bytes]:
    """Return a socket to be connected; it becomes writable when the other end has proven to have the secret.
    ``routing_id`` is its name at a ROUTER; ZeroMQ chooses one when empty.

    Raises:
        ValueError: there is no secret.
    """
    key = _server_key(secret)
    socket = _socket(context, zmq.DEALER, max_bytes)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = zmq.curve_public(key)
    socket.immediate = True  # nothing is queued for a stranger
    if routing_id:
        socket.routing_id = routing_id
    return socket


def part(socket: zmq.Socket[bytes], peers: Iterable[bytes], word: bytes) -> None:
    """Wait until the receivers of a last message have left, before their ROUTER is closed; two seconds at most.

    A socket of ``client_socket`` drops unread messages in the moment its connection ends. So the sender of the last
    message must not leave first; a receiver leaves when it has read the message. To detect that, ``word`` is sent until
    they have left: the last message, or one that is not read after it.
    """
    socket.router_mandatory = True
    present, deadline = set(peers), time.monotonic() + _PART_S
    while present and time.monotonic() < deadline:
        for peer in tuple(present):
            try:
                socket.send_multipart([peer, word], zmq.NOBLOCK)
            except zmq.Again:
                pass  # it reads nothing
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                present.discard(peer)
        if present and socket.poll(_PART_LOOK_MS):
            socket.recv_multipart()  # ignore messages from now on


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, max_bytes: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = True  # and IPv4
    socket.maxmsgsize = max_bytes
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.connect_timeout = _CONNECT_MS
    socket.reconnect_ivl, socket.reconnect_ivl_max = _RETRY_MS, _RETRY_MOST_MS
    socket.backlog = _BACKLOG
    return socket
