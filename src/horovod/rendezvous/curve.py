"""Sockets between hosts: ZeroMQ with CURVE, for processes that have the job's secret and nobody else.

Both ends draw their key pairs from the secret, one pair for all who listen and one for all who connect, so nothing
has to be handed around. Whoever connects must know the public key of those who listen, and have the secret key of those
who connect; the gate (``rendezvous.gate``) checks the latter. All else, whatever bytes it sends, is turned away.

Source: RFC 23 (ZMTP), 26 (CurveZMQ) and 27 (ZAP) of rfc.zeromq.org; zmq_curve(7), zmq_setsockopt(3).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable
from typing import NamedTuple

import zmq
from zmq.utils import z85

from horovod.rendezvous.gate import gate_of, terminate

__all__ = ["MAX_BYTES", "KeyPair", "client_socket", "key_pair", "part", "server_socket", "terminate"]

MAX_BYTES = 64 << 20
"""Size of a message that is taken, at most; a peer that sends a larger one is cut off."""
#: A peer that has not shown its key within this time is cut off; one that does not answer is tried again.
_HANDSHAKE_MS, _CONNECT_MS, _RETRY_MS, _RETRY_MOST_MS = 10_000, 3_000, 50, 1_000
_BACKLOG = 1024
#: How long, and how often, to look whether those who were told the last word are gone.
_PART_S, _PART_LOOK_MS = 2.0, 5


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


def part(socket: zmq.Socket[bytes], peers: Iterable[bytes], word: bytes) -> None:
    """Stay until those who are told the last word are gone, before their ROUTER is closed.

    A socket of ``client_socket`` forgets what it has not read yet in the moment its connection ends. So who says the
    last word must not be the first to go; who has read it goes.

    Args:
        socket: a ROUTER.
        peers: their routing ids.
        word: what they are sent until they are gone, which tells who is: the last word, or what nobody reads after it.

    Blocks for two seconds, at most.
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
            socket.recv_multipart()  # nobody is heard any more


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
