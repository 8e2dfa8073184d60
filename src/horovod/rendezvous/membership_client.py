"""The job service's client in a process of an elastic job: stays connected, asks for places, learns of changes.

Its thread sends and receives. Once a second it reports that the process is there, together with the unanswered
request, and the service answers with its full status: so nothing depends on a single message.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from horovod._version import __version__
from horovod.errors import DismissedError, HorovodInternalError, InitError
from horovod.rendezvous.client import connect_first
from horovod.rendezvous.keys import SERVICE, purpose_key
from horovod.rendezvous.protocol import Fate, MemberNews, MemberPlace, MemberStatus, Refused, pack, unpack, version_of
from horovod.rendezvous.waiting import Patience

__all__ = ["MembershipClient", "Superseded"]

Socket = zmq.Socket[bytes]
_Message = MemberStatus | MemberPlace | Refused | Fate
#: Heartbeat interval, and number of unanswered heartbeats after which the service counts as lost.
_BEAT_S, _BEATS = 1.0, 10
#: Time for the last message.
_LAST_MESSAGE_MS = 500
_MOST_WORDS = 500
#: Interval at which a waiting thread lets signals through.
_LOOK_S = 0.1
#: Counts the attempts of this process, over all of its connections.
_attempts = 0


class Superseded(HorovodInternalError):
    """The generation that this process was joining will not begin; another one will."""


class MembershipClient:
    """See the module. One thread calls its methods; any thread or handler may use ``wants_change`` and ``leave``.

    Args:
        places: endpoints of the service.
        secret: the job's secret.
        slot: host and slot number of this process.
        timeout_s: seconds to look for the service.
        on_loss: called by the client's thread when a rank of the present generation has ended, with that rank, or with
            -1 when the service has ended, and with how it ended.
        home: program that runs the service, for messages.

    Raises:
        InitError: no service answers, or it does not know this process.

    Blocks until the service has answered.
    """

    def __init__(
        self,
        places: Sequence[str],
        secret: bytes,
        slot: tuple[str, int],
        timeout_s: float,
        on_loss: Callable[[int, str], None] = lambda rank, how: None,
        home: str = "horovodrun",
    ) -> None:
        self._on_loss, self._home = on_loss, home
        self._where = f"the job service at {', '.join(places)}"
        self._news = MemberNews(*slot, _nonce(os.getpid()), os.getpid())
        self.status = MemberStatus(0, 0, 0, False)  # the latest status
        self._place: MemberPlace | None = None
        self._refused: Refused | None = None
        self._failure = self._last_words = ""
        self._has_answered = self._is_closed = self._wants_out = False
        self._unanswered = 0
        self._changed = threading.Condition()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._wake = -1
        nobody = f"no job service answers at {', '.join(places)}: has {home} ended, or is a firewall in between?"
        try:
            key = purpose_key(secret, SERVICE)
            self._socket, _ = connect_first(self._context, key, lambda: places, Patience(timeout_s), nobody)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            self._context.destroy()
            raise
        self._thread = threading.Thread(target=self._run, name="horovod-membership", daemon=True)
        self._thread.start()
        try:
            self._wait(lambda: self._has_answered)
        except BaseException:
            self.close()
            raise

    @property
    def wants_change(self) -> bool:
        """Whether the service wants another generation than the one that this process is in."""
        status, place = self.status, self._place
        return status.wants_change and place is not None and place.generation == status.begun

    def leave(self) -> None:
        """Ask to leave the job at the next change; never blocks."""
        self._wants_out = True
        self._ring()

    def ready(self, progress: int, digest: str) -> None:
        """Report that this process waits for a place, with so many completed steps and this hash of its state."""
        global _attempts
        with self._changed:
            _attempts += 1
            self._place = self._refused = None
            self._say("ready", attempt=_attempts, progress=progress, digest=digest)

    def await_place(self) -> MemberPlace:
        """Return the place of this process in the next generation.

        Raises:
            DismissedError: it has no place any more, because it asked to leave or its host was withdrawn.
            InitError: the job is over, or the service is lost.

        Blocks until the service has decided.
        """
        self._wait(lambda: self._place is not None and self._place.generation == self.status.placed)
        assert self._place is not None
        return self._place

    def check(self, place: MemberPlace) -> None:
        """Raise an error when a place is not valid any more.

        Raises:
            Superseded: wait for another place.
            InitError: the job is over, or the service is lost.
        """
        self._enforce()
        if place.generation != self.status.placed:
            raise Superseded("a rank was lost while the ranks met")

    def is_superseded(self, place: MemberPlace, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds, and return whether a place is not valid any more."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while place.generation == self.status.placed and time.monotonic() < deadline:
                self._enforce()
                self._changed.wait(_LOOK_S)
            return place.generation != self.status.placed

    def joined(self, place: MemberPlace) -> None:
        """Report that this process has met the other members, and wait for all of them.

        Raises:
            Superseded: the generation will not begin.
            InitError: the job is over, or the service is lost.

        Blocks until the generation begins.
        """

        def has_begun() -> bool:
            if self.status.begun == place.generation:
                return True
            self.check(place)
            return False

        with self._changed:
            self._say("joined", attempt=place.attempt, generation=place.generation)
        self._wait(has_begun)
        with self._changed:
            self._say("here")

    def done(self, progress: int) -> None:
        """Report that the training of this process, and of the others, has ended after so many steps."""
        with self._changed:
            self._say("done", progress=progress)

    def close(self, how: str = "") -> None:
        """End the connection; the service learns that this process has left its generation, and by which exception."""
        if self._is_closed:
            return
        self._last_words = how[:_MOST_WORDS]
        self._is_closed = True
        self._ring()
        self._thread.join()
        self._context.destroy()
        os.close(self._wake)
        self._wake = -1

    def _say(self, verb: str, **more: object) -> None:
        self._news = msgspec.structs.replace(
            self._news, verb=verb, **{"attempt": 0, "generation": 0, "progress": 0, "digest": "", **more}
        )
        self._ring()

    def _ring(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _wait(self, has_come: Callable[[], bool]) -> None:
        with self._changed:
            while True:
                self._enforce()
                if has_come():
                    return
                self._changed.wait(_LOOK_S)

    def _enforce(self) -> None:
        """Raise the error for a refusal, a lost service or a closed client."""
        if self._refused is not None:
            kind = DismissedError if self._refused.is_dismissal else InitError
            raise kind(f"this process has no place in the job: {self._refused.why}")
        if self._failure:
            raise InitError(self._failure)
        if self._is_closed:
            raise InitError("this process has left its job: shutdown() was called")

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beat_at = 0.0
        while not self._is_closed:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + _BEAT_S
                self._beat()
            for what, _ in poller.poll(int(max(0.0, beat_at - now) * 1000) + 1):
                if what == self._wake:
                    os.eventfd_read(self._wake)
                    self._send()
            while self._socket.poll(0):
                self._hear(self._socket.recv())
        self._socket.linger = _LAST_MESSAGE_MS
        if self._news.verb == "done":
            self._send()  # again: it may not have been sent, and a process that leaves without it is a loss
        self._news = msgspec.structs.replace(self._news, verb="left", how=self._last_words)
        self._send()

    def _beat(self) -> None:
        self._send()
        # Count heartbeats, not seconds: while this thread does not run, the service is not silent.
        self._unanswered += 1
        if self._unanswered > _BEATS and not self._failure:
            self._fail(f"{self._where} has not answered for {_BEATS * _BEAT_S:g} s; has {self._home} ended?")

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = why
            self._changed.notify_all()
        self._on_loss(-1, why)

    def _send(self) -> None:
        with contextlib.suppress(zmq.Again):  # connecting again; the next heartbeat repeats it
            self._socket.send(pack(msgspec.structs.replace(self._news, wants_out=self._wants_out)), zmq.NOBLOCK)

    def _hear(self, data: bytes) -> None:
        message: _Message | None = unpack(data, _Message)  # type: ignore[arg-type]
        if message is None:
            if (version := version_of(data)) not in ("", __version__):
                self._fail(
                    f"the job service has khorovod {version}, and this process {__version__}; install one version"
                )
            return
        self._unanswered = 0
        if isinstance(message, Fate):
            place = self._place
            if place is not None and place.generation == message.generation:
                self._on_loss(message.rank, message.how)
            return
        with self._changed:
            if isinstance(message, MemberStatus):
                self.status = message
            elif message.attempt == self._news.attempt or not self._has_answered:
                if isinstance(message, MemberPlace):
                    self._place = message
                    # The earlier status does not include this place.
                    self.status = msgspec.structs.replace(self.status, placed=message.generation)
                else:
                    self._refused = message
            self._has_answered = True
            self._changed.notify_all()


@functools.cache
def _nonce(pid: int) -> bytes:
    """Return the nonce of this process, for all of its connections; a forked one has another."""
    return secrets.token_bytes(16)
