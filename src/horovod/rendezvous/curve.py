"""Sockets between hosts: ZeroMQ with CURVE, for processes that have the job's secret and nobody else.

Both ends draw their key pairs from the secret, one pair for all who listen and one for all who connect, so nothing
has to be handed around. Whoever connects must know the public key of those who listen, and have the secret key of those
who connect; the gate (``rendezvous.gate``) checks the latter. All else, whatever bytes it sends, is turned away.

Source: RFC 23 (ZMTP), 26 (CurveZMQ) and 27 (ZAP) of rfc.zeromq.org; zmq_curve(7), zmq_setsockopt(3).
"""

from __future__ import annotations

import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85

from horovod.rendezvous.gate import gate_of, terminate

__all__ = ["MAX_BYTES", "KeyPair", "client_socket", "key_pair", "server_socket", "terminate"]

MAX_BYTES = 64 << 20
"""Size of a message that is taken, at most; a peer that sends a larger one is cut off."""
#: A peer that has not shown its key within this time is cut off; one that does not answer is tried again.
_HANDSHAKE_MS, _CONNECT_MS, _RETRY_MS, _RETRY_MOST_MS = 10_000, 3_000, 50, 1_000
_BACKLOG = 1024


class KeyPair(NamedTuple):
    """A pair of CURVE keys, in Z85.

    Attributes:
        public: what others may know.
        secret: what nobody else may.
    """

    public: bytes
    secret: bytes


def key_pair(secret: bytes, role: str) -> KeyPair:
    """Return the keys of all processes of a job that have the same role.

    Args:
        secret: the job's secret.
        role: "server" or "client".

    Raises:
        ValueError: there is no secret.
    """
    if not secret:
        raise ValueError("a socket between hosts needs the job's secret")
    own = z85.encode(hmac.digest(secret, b"horovod curve " + role.encode(), "sha256"))
    return KeyPair(zmq.curve_public(own), own)


def server_socket(
    context: zmq.Context[zmq.Socket[bytes]], secret: bytes, kind: int = zmq.ROUTER, max_bytes: int = MAX_BYTES
) -> zmq.Socket[bytes]:
    """Return a socket that can be bound, on which only processes with the job's secret are heard.

    Args:
        context: its context; ``terminate`` ends it.
        secret: the job's secret.
        kind: such as ``zmq.ROUTER``.
        max_bytes: size of a message that is taken, at most.

    Raises:
        ValueError: there is no secret.
    """
    socket = _socket(context, kind, max_bytes)
    socket.curve_secretkey = key_pair(secret, "server").secret
    socket.curve_server = True
    gate_of(context).watch(socket, key_pair(secret, "client").public)
    return socket


def client_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    secret: bytes,
    kind: int = zmq.DEALER,
    max_bytes: int = MAX_BYTES,
    routing_id: bytes = b"",
) -> zmq.Socket[bytes]:
    """Return a socket that can be connected; it can be written once the other end has proven to have the secret.

    Args:
        context: its context.
        secret: the job's secret.
        kind: such as ``zmq.DEALER``.
        max_bytes: size of a message that is taken, at most.
        routing_id: the name that a ROUTER knows it by; one of its own when empty.

    Raises:
        ValueError: there is no secret.
    """
    socket = _socket(context, kind, max_bytes)
    own = key_pair(secret, "client")
    socket.curve_publickey, socket.curve_secretkey = own
    socket.curve_serverkey = key_pair(secret, "server").public
    socket.immediate = True  # nothing is queued for a stranger
    if routing_id:
        socket.routing_id = routing_id
    return socket


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
