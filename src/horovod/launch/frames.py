"""Messages between the launcher and the agent of another host, and their frames on a pair of pipes.

A frame is four bytes of length and a MessagePack of one of the structs below. The agent begins with ``MARK``, which
separates its frames from text that a shell prints at login.

    launcher to agent   Check, CallPart, StartJob, StartRank, KillRank, PassOrder, Taken, Unwanted, Alive,
                        (closed) end all ranks of this host
    agent to launcher   AgentHello, Checked, Output, News, Returned, Alive

A rank is identified by the number of its process in the job.

Both send a heartbeat each second. Output is limited by a window, which ``Taken`` opens again, so that news and
heartbeats never wait behind output that a terminal has not shown yet.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = [
    "ALIVE_S",
    "CHUNK_BYTES",
    "MARK",
    "SILENCE_BEFORE_START_S",
    "SILENCE_S",
    "WINDOW_BYTES",
    "AgentHello",
    "AgentWire",
    "Alive",
    "CallPart",
    "Check",
    "Checked",
    "FrameError",
    "KillRank",
    "News",
    "Output",
    "PassOrder",
    "Returned",
    "StartJob",
    "StartRank",
    "Taken",
    "Unwanted",
]

MARK = b"\0khorovod agent 2\n"
"""First bytes that an agent sends; the number is the version of the protocol."""
ALIVE_S = 1.0
SILENCE_S = 5.0
"""Time without a heartbeat after which the other end is lost. A cut of the network for 2 s is no loss: TCP sends data
again 0.2, 0.4, 0.8, 1.6 and 3.2 s after the first time, so the other end hears nothing for 4.2 s."""
SILENCE_BEFORE_START_S = 120.0
"""This limit for the launcher before ``StartJob``: it may still import or pickle, and no rank runs."""
WINDOW_BYTES = 1 << 20
"""Most bytes of output in flight to the launcher."""
CHUNK_BYTES = 1 << 16
"""Most bytes of output, of a pickled call or of a result in one frame."""
_FEWEST_UNANSWERED = 2
_MOST_NOISE = 1 << 20
_LONGEST = 32 << 20
#: srun passes output on by the line.
_END = b"\n"
_HEADER = 4
Environ = dict[bytes, bytes]


class FrameError(ValueError):
    """The other end does not speak this protocol."""


class AgentHello(msgspec.Struct, tag="hello", frozen=True):
    """Describes the agent's host."""

    version: str  # version of this package
    cores: int  # number of cores that ranks may use
    machine: str  # identifier of the machine or container, equal for all of its names


class Check(msgspec.Struct, tag="check", frozen=True):
    """Asks for problems that would keep the ranks from starting."""

    folder: bytes  # folder in which the ranks run
    command: bytes  # program that they run
    path: bytes  # value of PATH, for the search of the program
    python: bytes  # the launcher's own Python
    interfaces: list[str]  # names of network interfaces that must be there


class Checked(msgspec.Struct, tag="checked", frozen=True):
    """Problems that would keep the ranks from starting: sentences, none when all is well."""

    problems: list[str]


class StartJob(msgspec.Struct, tag="job", frozen=True):
    """Prepares the start of ranks."""

    host: bytes  # name of the agent's host in the job
    command: list[bytes]  # program and arguments
    environ: Environ  # variables that all ranks share, without the ones of the host
    returns: bool  # whether each rank makes a call and returns its result
    silence_s: float  # longest silence of the launcher, in seconds


class StartRank(msgspec.Struct, tag="start", frozen=True):
    """Starts a rank in a slot of this host, with variables of its own."""

    rank: int
    slot: int
    environ: Environ


class KillRank(msgspec.Struct, tag="kill", frozen=True):
    """Kills a rank; with ``stopped_pid`` only if a signal has stopped that process."""

    rank: int
    stopped_pid: int = 0


class CallPart(msgspec.Struct, tag="call", frozen=True):
    """A piece of the call that every rank makes; before StartJob."""

    data: bytes


class PassOrder(msgspec.Struct, tag="order", frozen=True):
    """An order for the keeper."""

    order: bytes


class Taken(msgspec.Struct, tag="taken", frozen=True):
    """Number of bytes of output that the launcher has passed on."""

    nbytes: int


class Unwanted(msgspec.Struct, tag="unwanted", frozen=True):
    """Stops an output that has no reader any more."""

    rank: int
    stream: str


class Output(msgspec.Struct, tag="output", frozen=True):
    """Output of a rank; empty at the end."""

    rank: int
    stream: str
    data: bytes


class News(msgspec.Struct, tag="news", frozen=True):
    """An event from the keeper."""

    event: dict[str, bool | int | str | list[int]]


class Returned(msgspec.Struct, tag="returned", frozen=True):
    """A piece of the result of a rank's call; sent before the news of its end."""

    rank: int
    data: bytes


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """A heartbeat."""


_ToAgent = Check | StartJob | StartRank | KillRank | CallPart | PassOrder | Taken | Unwanted
_Frame = _ToAgent | AgentHello | Checked | Output | News | Returned | Alive


class AgentWire:
    """Frames over two pipes. Never blocks. An agent begins with ``MARK``, which the launcher waits for."""

    def __init__(self, incoming: int, outgoing: int, *, is_launcher: bool) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        #: Whether the other end has closed, or nothing can be sent to it any more.
        self.is_closed = False
        #: When the other end was last heard.
        self.heard_at = time.monotonic()
        #: When to send the next heartbeat.
        self.alive_at = self.heard_at + ALIVE_S
        self._stood = (0.0, 0.0)  # for how long this process did not run, and until when
        self._unanswered = 0  # our heartbeats since then; a process that did not run has sent none
        self._seeks_mark = is_launcher
        self._received = bytearray()
        self._waiting = deque(() if is_launcher else (MARK,))
        self._sent = 0  # bytes sent of the first waiting frame
        self._is_flushing = False
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Frame)
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)

    @property
    def noise(self) -> bytes:
        """Output that has come before the agent's mark so far."""
        return bytes(self._received[-4096:]) if self._seeks_mark else b""

    @property
    def backlog(self) -> bool:
        """Whether frames wait to be sent."""
        return bool(self._waiting) and not self.is_closed

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame, now or with the next ``flush``; safe in a signal handler."""
        data = msgspec.msgpack.encode(frame)
        self._waiting.append(len(data).to_bytes(_HEADER, "big") + data + _END)
        self.flush()

    def flush(self) -> None:
        """Send as much as the pipe takes."""
        if self._is_flushing:
            return  # a signal handler has interrupted this very function
        self._is_flushing = True
        try:
            while self._waiting and not self.is_closed:
                head = self._waiting[0]
                self._sent += os.write(self.outgoing, memoryview(head)[self._sent :])
                if self._sent == len(head):
                    self._sent = 0
                    self._waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        finally:
            self._is_flushing = False

    def show_life(self) -> None:
        """Send a heartbeat, if one is due."""
        now = time.monotonic()
        if now >= self.alive_at:
            if now - self.alive_at > ALIVE_S:
                self._stood = now - self.alive_at, now
            self.alive_at = now + ALIVE_S
            self._unanswered += 1
            if not self._waiting:  # waiting frames show life, too
                self.send(Alive())

    @property
    def late_s(self) -> float:
        """Seconds by which our heartbeat is late, or lately was: a process that did not run has sent none."""
        now = time.monotonic()
        late_s, at = self._stood
        return max(0.0, now - self.alive_at, late_s if now - at < 2 * SILENCE_S else 0.0)

    def silent_at(self, limit_s: float) -> float:
        """When the other end has sent nothing for ``limit_s`` seconds; infinite after too few heartbeats of ours."""
        return self.heard_at + limit_s if self._unanswered > _FEWEST_UNANSWERED else math.inf

    def is_silent(self, limit_s: float) -> bool:
        """Whether the other end has sent nothing for ``limit_s`` seconds."""
        return time.monotonic() > self.silent_at(limit_s)

    def receive(self) -> Iterator[Any]:
        """Yield the frames that have come.

        Raises:
            FrameError: the other end does not speak this protocol.
        """
        try:
            data = os.read(self.incoming, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
        self.heard_at, self._unanswered = time.monotonic(), 0
        self._received += data
        if self._seeks_mark and not self._find_mark():
            return
        while len(self._received) >= _HEADER:
            end = _HEADER + int.from_bytes(self._received[:_HEADER], "big") + len(_END)
            if end > _LONGEST:
                raise FrameError(f"a frame of {end} bytes")
            if len(self._received) < end:
                return
            body = bytes(self._received[_HEADER : end - len(_END)])
            del self._received[:end]
            try:
                yield self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise FrameError(str(error)) from error

    def _find_mark(self) -> bool:
        at = self._received.find(MARK)
        if at < 0:
            if len(self._received) > _MOST_NOISE:
                raise FrameError(f"{_MOST_NOISE} bytes of other output")
            return False
        del self._received[: at + len(MARK)]
        self._seeks_mark = False
        return True
