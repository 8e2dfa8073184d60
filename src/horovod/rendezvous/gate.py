"""The gate of a ZeroMQ context: lets those in who have the key, and tells once who tried without it.

libzmq asks it, over ZAP, whether the client key of each new connection is the job's; and it hears from libzmq of
connections that never got so far. One thread for each context that listens; it ends with the context.
Source: RFC 27 (ZAP) of rfc.zeromq.org, zmq_socket_monitor(3).
"""

from __future__ import annotations

import hmac
import itertools
import re
import threading
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from horovod.logs import logger

__all__ = ["Gate", "gate_of", "terminate"]

_ZAP, _CONTROL = "inproc://zeromq.zap.01", "inproc://horovod-gate"
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
#: How a handshake ends with which nothing is wrong: well, or because the other end has gone, or says nothing.
_ENDS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = _FAILURES | _ENDS | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_MAPPED = re.compile(r"\[::ffff:([\d.]+)\]")  # an IPv4 address, as sockets for both kinds spell it
_lock = threading.Lock()
_gates: dict[int, Gate] = {}


@dataclass
class _Door:
    """One listening socket.

    Attributes:
        client: public key that opens it.
        has_complained: whether a stranger was logged.
        addresses: where the strangers of the present moment came from.
        ends: counts handshakes that have ended.
        accepted: what ``ends`` was when each connection came, by its descriptor.
    """

    client: bytes
    has_complained: bool = False
    addresses: list[str] = field(default_factory=list)
    ends: int = 0
    accepted: dict[int, int] = field(default_factory=dict)

    def is_turned_away(self, event: int, value: int) -> bool:
        """Whether an event says that a stranger was turned away.

        Who does not even speak ZeroMQ's protocol is cut off without a word about a handshake: if none has ended since
        the connection came, it was not its own.
        """
        if event & _ENDS:
            self.ends += 1
        elif event == zmq.EVENT_ACCEPTED:
            self.accepted[value] = self.ends
        elif event == zmq.EVENT_DISCONNECTED:
            return self.accepted.pop(value, -1) == self.ends
        return bool(event & _FAILURES)


class Gate:
    """Answers for all listening sockets of a context.

    Args:
        context: the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._key = context.underlying
        # A shadow's sockets are its own: ``context.destroy()`` would close them under this thread.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._doors: dict[bytes, _Door] = {}
        self._numbers = itertools.count(1)
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind(_ZAP)
        self._control = self._context.socket(zmq.PULL)
        self._control.bind(_CONTROL)
        self._thread = threading.Thread(target=self._run, name="horovod-gate", daemon=True)
        self._thread.start()

    def watch(self, socket: zmq.Socket[bytes], client: bytes) -> None:
        """Let nobody in at ``socket``, which is not bound yet, who has not the secret key to ``client``.

        Args:
            socket: a CURVE server of the context.
            client: public key, in Z85.
        """
        domain = str(next(self._numbers)).encode()
        self._doors[domain] = _Door(client)
        socket.zap_domain = domain
        socket.zap_enforce_domain = True  # no gate, no entry
        socket.monitor(_monitor(domain), _EVENTS)
        with self._context.socket(zmq.PUSH) as sender:
            sender.linger = -1
            sender.connect(_CONTROL)
            sender.send(domain)

    def join(self) -> None:
        """Wait until the context has been terminated, and the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        monitors: dict[zmq.Socket[bytes], bytes] = {}
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._control, zmq.POLLIN)
        try:
            while True:
                for socket, _ in reversed(poller.poll()):  # who was turned away before who asks
                    if socket is self._zap:
                        self._answer(self._zap.recv_multipart())
                    elif socket is self._control:
                        domain = self._control.recv()
                        monitor = self._context.socket(zmq.PAIR)
                        monitors[monitor] = domain
                        monitor.linger = 0
                        monitor.rcvhwm = 0  # or a crowd of strangers would make libzmq wait for this thread
                        monitor.connect(_monitor(domain))
                        poller.register(monitor, zmq.POLLIN)
                    elif self._has_stopped(socket, self._doors[monitors[socket]]):
                        poller.unregister(socket)
                        del self._doors[monitors.pop(socket)]
                        socket.close()
        except zmq.ZMQError as error:
            if error.errno != zmq.ETERM:  # making a socket says it in other words than using one
                raise
        finally:
            with _lock:  # before the context is gone, whose address another one may get
                if _gates.get(self._key) is self:
                    del _gates[self._key]
            for socket in (self._zap, self._control, *monitors):
                socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        """Answer one question of libzmq's: may this client come in?"""
        split = request.index(b"") + 1
        version, number, domain, address, _, mechanism, *credentials = request[split:]
        door = self._doors.get(domain)
        is_known = (
            door is not None
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and hmac.compare_digest(z85.encode(credentials[0]), door.client)
        )
        if door is not None and not is_known:
            door.addresses.append(address.decode(errors="replace"))
        code, text = (b"200", b"OK") if is_known else (b"400", b"no key")
        self._zap.send_multipart([*request[:split], version, number, code, text, b"", b""])

    def _has_stopped(self, monitor: zmq.Socket[bytes], door: _Door) -> bool:
        """Take one event of a listening socket; whether it has been closed."""
        event = parse_monitor_message(monitor.recv_multipart())
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            return True
        if door.is_turned_away(event["event"], event["value"]) and not door.has_complained:
            door.has_complained = True
            where = _MAPPED.sub(r"\1", event["endpoint"].decode(errors="replace"))
            came = f" from {door.addresses[0].removeprefix('::ffff:')}" if door.addresses else ""
            logger.warning(
                f"somebody{came} connected to {where} without this job's key; it was turned away and had no effect, as "
                f"will be all others, without further notice"
            )
        return False


def gate_of(context: zmq.Context[zmq.Socket[bytes]]) -> Gate:
    """Return the gate of a context, made when it is asked for first."""
    with _lock:
        gate = _gates.get(context.underlying)
        if gate is None:
            gate = _gates[context.underlying] = Gate(context)
        return gate


def terminate(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Close a context and all of its sockets; what they have not sent yet is lost, after their ``linger``.

    Blocks until its threads have ended.
    """
    with _lock:
        gate = None if context.closed else _gates.get(context.underlying)
    context.destroy()
    if gate is not None:
        gate.join()


def _monitor(domain: bytes) -> str:
    return f"inproc://horovod-gate-{domain.decode()}"
