"""The job service: introduces the hosts of a job to each other, reports how ranks ended, keeps the shared table.

One per job: a thread of ``horovodrun``, or a process of its own on rank 0's host under launchers that start ranks
themselves (``rendezvous.hosting``). It accepts only processes with the job's key.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from horovod._version import __version__
from horovod.core.membership_events import Decision, Event, Fence, Policy, Silent, Tick
from horovod.logs import logger
from horovod.rendezvous import curve
from horovod.rendezvous.generations import Generations, Watches
from horovod.rendezvous.interfaces import endpoint
from horovod.rendezvous.keys import SERVICE, purpose_key
from horovod.rendezvous.meetings import Meetings
from horovod.rendezvous.protocol import (
    MAX_BYTES,
    AllHere,
    Answers,
    Ask,
    Failed,
    GiveUp,
    Join,
    MemberNews,
    Question,
    Refusal,
    Refused,
    StillMissing,
    Table,
    Value,
    WatchNews,
    number_of,
    pack,
    unpack,
    version_of,
)

__all__ = ["Service", "listen"]

_MOST_AT_ONCE = 100_000
#: Interval of the ticks for the membership.
_TICK_MS = 100
#: Number of messages to take from a socket before any other work.
_IN_A_ROW = 1000
#: Descriptors of the service itself.
_OWN_FILES = 20
_NOT_ELASTIC = "this job was not started elastically: unset HOROVOD_ELASTIC for its ranks"


class Service:
    """Serves one job, in a thread of its own.

    Args:
        secret: the job's secret.
        addresses: addresses of this host to listen at, or endpoints such as ``ipc://@name``.
        ports: ports to try, all free ones are used; any port when empty.
        hosts: name of the host of each rank, by rank; empty when that is not known.
        policy: how the members of the job may change; None where the launcher defines them.

    Raises:
        OSError: the service cannot listen at any of the addresses, or may not open a file for each rank.
    """

    def __init__(
        self,
        secret: bytes,
        addresses: Sequence[str],
        ports: Sequence[int] = (),
        hosts: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> None:
        _check_files(len(hosts) if policy is None else 2 * policy.size)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._meetings = Meetings(hosts)
        self._table: dict[str, bytes] = {}
        # Per key, the last question of each client that waits for its value.
        self._parked: dict[str, dict[bytes, int]] = collections.defaultdict(dict)
        self._lock = threading.Lock()
        self._news: list[Callable[[], Answers]] = []
        self._generations = None if policy is None else Generations(policy)
        self._watches = Watches(self._generations) if self._generations and policy and policy.is_open else None
        self._decisions: list[Decision] = []
        self._decided = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._told = threading.Event()
        self._is_closed = False
        self._answered: collections.deque[bytes] = collections.deque(maxlen=_MOST_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="horovod-service", daemon=True)
        try:
            self._socket = curve.server_socket(self._context, purpose_key(secret, SERVICE), max_bytes=MAX_BYTES)
            self._socket.sndhwm = self._socket.rcvhwm = _MOST_AT_ONCE
            # endpoints at which it listens, several addresses of one place
            self.endpoints = listen(self._socket, addresses, ports)
            self._wake, self._woken = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
            self._woken.bind("inproc://horovod-service")
            self._wake.connect("inproc://horovod-service")
        except BaseException:
            self._context.destroy()
            os.close(self._decided)
            raise
        self._thread.start()

    def ended(self, rank: int, who: str, how: str) -> None:
        """Report the end of a rank, in words, to all hosts that wait for it, now or later."""
        self._later(lambda: self._meetings.ended(rank, who, how))

    def put(self, event: Event) -> None:
        """Report an event to the membership of a job with a policy: hosts, ends of processes, a wish to leave; ticks
        are made here, too.

        Raises:
            ValueError: the job has no policy.
        """
        generations = self._policed()
        self._later(lambda: generations.handle(event))

    def order(self, order: Fence | Silent | None) -> None:
        """Have the watch of a host kill a process that another launcher has started: at once (``Fence``), or only if a
        signal has stopped it (``Silent``); None lets all watches end.
        """
        watches = self._watches
        assert watches is not None
        self._later(lambda: watches.order(order))

    def _later(self, act: Callable[[], Answers]) -> None:
        """Let the service's thread act."""
        with self._lock:
            self._news.append(act)
            self._ring()

    def take(self) -> list[Decision]:
        """Return the decisions since the last call, in their order; never blocks.

        The launcher carries out ``Start``, ``Fence`` and ``Finish``. ``Assign`` and ``Begin`` are for its output: the
        service has already told the ranks.
        """
        with self._lock:
            decisions, self._decisions = self._decisions, []
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._decided)
            return decisions

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``take`` has decisions; only the service may close it."""
        return self._decided

    @property
    def progress(self) -> int:
        """The largest progress of any process when it was last ready."""
        return self._policed().progress

    @property
    def is_awaited(self) -> bool:
        """Whether a living process has called ``init()``."""
        return self._policed().is_awaited

    def _policed(self) -> Generations:
        if self._generations is None:
            raise ValueError("the launcher defines the members of this job: give Service a policy")
        return self._generations

    def await_told(self, timeout_s: float) -> None:
        """Wait until all hosts know of a failed host, if there is one; ``timeout_s`` seconds at most."""
        if self._meetings.has_to_tell:
            self._told.wait(timeout_s)

    def close(self) -> None:
        """End the service. Blocks until all hosts have read their last answer, at most two seconds."""
        with self._lock:
            if self._is_closed:
                return
            self._ring()
            self._is_closed = True
        self._thread.join()
        curve.part(self._socket, self._answered, pack(StillMissing("")))
        self._context.destroy()
        os.close(self._decided)

    def _ring(self) -> None:
        if not self._is_closed:
            self._wake.send(b"")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        generations, ticked_at = self._generations, 0.0
        while not self._is_closed:
            for socket, _ in poller.poll(None if generations is None else _TICK_MS):
                for _ in range(_IN_A_ROW):
                    message = socket.recv_multipart()
                    if socket is self._socket and len(message) == 2:
                        self._hear(*message)
                    if not socket.poll(0):
                        break
            with self._lock:
                news, self._news = self._news, []
            if generations is not None and (now := time.monotonic()) - ticked_at >= _TICK_MS / 1000:
                ticked_at = now
                self._send(generations.handle(Tick(now)))
                if self._watches is not None:
                    self._send(self._watches.tick(now))
            for one in news:
                self._send(one())
            self._publish()
            if self._meetings.has_to_tell:
                self._told.clear()
            else:
                self._told.set()

    def _publish(self) -> None:
        """Make the decisions available to the launcher."""
        if self._generations is not None and (decisions := self._generations.take()):
            self._forget(self._generations.oldest)
            with self._lock:
                self._decisions += decisions
                os.eventfd_write(self._decided, 1)

    def _hear(self, sender: bytes, data: bytes) -> None:
        """Handle one message, and answer it."""
        meetings, generations = self._meetings, self._generations
        if (version := version_of(data)) and version != __version__:
            self._send(meetings.other_version(sender, version))
            return
        question: Question | None = unpack(data, Question)  # type: ignore[arg-type]
        if isinstance(question, Table):
            self._change(sender, number_of(data), question)
        elif isinstance(question, Join) and question.entry.ranks:
            self._send(meetings.join(sender, question, time.monotonic()))
        elif isinstance(question, GiveUp):
            self._send(meetings.leave(question))
        elif isinstance(question, Failed):
            self._send(meetings.failed(sender, question))
        elif isinstance(question, Ask):
            rank, number = question.rank, question.generation
            self._send([(sender, generations.fate(rank, number) if generations and number else meetings.fate(rank))])
        elif isinstance(question, MemberNews):
            refused = Refused(question.attempt, _NOT_ELASTIC, False)
            self._send(generations.hear(sender, question) if generations is not None else [(sender, refused)])
        elif isinstance(question, WatchNews) and self._watches is not None:
            self._send(self._watches.hear(sender, question))
        else:
            logger.warning("the job service has dropped a message that it does not understand")

    def _change(self, sender: bytes, number: int, question: Table) -> None:
        """Read or change the table."""
        table, key, amount = self._table, question.key, 0
        if question.verb == "get":
            if key not in table:
                self._parked[key][sender] = number
                if len(self._parked) > _MOST_AT_ONCE:
                    del self._parked[next(iter(self._parked))]  # its client has a limit of its own
                return
            self._send([(sender, Value(table[key]))], number)
            return
        if question.verb == "set":
            self._put(key, question.value)
        elif question.verb == "add":
            found = table.get(key, b"0")
            amount = (int(found) if found.lstrip(b"-").isdigit() else 0) + question.amount
            self._put(key, str(amount).encode())
        else:
            amount = int(key in table)
        self._send([(sender, Value(amount=amount))], number)

    def _forget(self, oldest: int) -> None:
        """Delete table entries of earlier generations of an elastic job, whose keys are ``/generation/...``."""
        for table in (self._table, self._parked):
            numbers = {key: key.split("/")[1] for key in table if key.startswith("/") and key.count("/") > 1}
            for key in [key for key, number in numbers.items() if number.isdigit() and int(number) < oldest]:
                del table[key]

    def _put(self, key: str, value: bytes) -> None:
        self._table[key] = value
        for sender, number in self._parked.pop(key, {}).items():
            self._send([(sender, Value(value))], number)

    def _send(self, answers: Answers, number: int = 0) -> None:
        self._publish()  # before a rank that acts on an answer can end
        for receiver, answer in answers:
            # A client that does not read its answers loses them, and does not delay others.
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart([receiver, pack(answer, number)], zmq.NOBLOCK)
            if isinstance(answer, AllHere | Refusal):
                self._answered.append(receiver)


def listen(socket: zmq.Socket[bytes], addresses: Sequence[str], ports: Sequence[int] = ()) -> list[str]:
    """Bind a socket to several addresses, or endpoints without a port, and return the endpoints. All free ports of
    ``ports`` are used, or any one when empty.

    Raises:
        OSError: it can listen at none of them.
    """
    found: list[str] = []
    refused: zmq.ZMQError | None = None
    for address in addresses:
        for port in ports or ("*",):
            where = address if "://" in address else endpoint(address, port)
            try:
                socket.bind(where)
            except zmq.ZMQError as error:
                refused = error
                continue
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2]
            found.append(where if where == address else endpoint(address, bound))
    if not found:
        assert refused is not None
        raise OSError(refused.errno, f"cannot listen at {', '.join(addresses)}: {refused}")
    return found


def _check_files(count: int) -> None:
    """See that ranks can open ``count`` connections; libzmq leaves those waiting for which it has no descriptor."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        with contextlib.ExitStack() as files:
            for _ in range(count + _OWN_FILES):
                files.callback(os.close, os.eventfd(0))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            f"this process may not open more than {limit} files at once, and the ranks need {count + _OWN_FILES} more; "
            f"raise the limit before the job starts: ulimit -n {max(4096, 2 * (limit + count))}"
        ) from None
