"""The thread of a host's leader that relays messages between the memory of its host and the other hosts.

It does not depend on the engine: deaths, questions, answers and heartbeats pass while the leader computes or is in the
middle of a collective. The hub is the leader of rank 0's host; messages between other hosts pass through it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from horovod.core.coordinator import LogEntry
from horovod.core.gathering import Message
from horovod.core.generation import Generation
from horovod.core.labels import LEFT
from horovod.links.hosts import frames, remote_ranks
from horovod.links.hosts.doorbell import WireDoorbell
from horovod.links.hosts.questions import Questions
from horovod.links.hosts.remote_ranks import HostMemory
from horovod.links.hosts.suspects import Suspects
from horovod.links.hosts.traces import Clock, TraceRelay
from horovod.links.hosts.wire import Wire, descriptor_of, has_more
from horovod.transports.hierarchical.mailbox import Mailbox
from horovod.transports.shm.control import Presence

__all__ = ["HUB", "Relay"]

HUB = 0
"""The host, among all, whose leader is rank 0."""
_TICK_S = 0.1
#: The tick while a recording is under way, or the reason for a loss is awaited.
_SHORT_TICK_S = 0.02
_PING_S = 0.5
_CLOCK_S = 2.0
_END_S = 15.0
#: How long to wait for trace events of this host's ranks when their leader leaves.
_TRACES_S = 5.0
#: A host that was heard within this time, or this part of the limit, was not silent: its connection was closed.
_SILENT_S, _SILENT_PART = 2.5, 0.5
#: How long a departure may wait for the log before it.
_BEHIND_S = 1.0


class Relay:
    """See the module.

    Args:
        generation: the ranks of the job.
        index: this host.
        host: memory that the ranks of this host share.
        socket: connected with the other leaders, or with the hub; owned from now on.
        ids: routing ids of the leaders, by host.
        timeout_s: how long a host may be silent; enforced by the socket, and named in errors.
        suspects: hosts whose connection has ended.
        mailbox: data that travels with requests; None if no data does.
    """

    # the doorbell of a rank alone on its host, whose engine serves the wire itself; else None
    doorbell: WireDoorbell | None = None

    def __init__(
        self,
        generation: Generation,
        index: int,
        host: HostMemory,
        socket: zmq.Socket[bytes],
        ids: Sequence[bytes],
        timeout_s: float,
        suspects: Suspects,
        mailbox: Mailbox | None = None,
    ) -> None:
        self._suspects = suspects
        self.mailbox = mailbox
        self._generation, self._index = generation, index
        self._control, self._board, self._remote, self._neighbours = host
        self._timeout_s = timeout_s
        self._ranks = generation.hosts[index]
        # at the hub, requests of ranks on other hosts; read by the engine
        self.requests: collections.deque[Message] = collections.deque()
        # elsewhere, the log, with departures after the entries before them; read by the engine
        self.log: collections.deque[LogEntry | frames.RankState] = collections.deque()
        # whether the engine has held submissions back for so long that it should send them
        self.is_owed: Callable[[], bool] = lambda: False
        self._departing: set[int] = set()
        self._behind: tuple[int, float] = (0, 0.0)
        self.wire = Wire(socket, ids, index, self._take, self._lose)
        self._context = socket.context
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) if index != HUB else None
        self._told: dict[int, tuple[int, int]] = {}
        self._heard_s = dict.fromkeys(self.wire.peers, time.monotonic())
        self._pinged_s = 0.0
        self._pinged_after = -1
        self._clock = Clock()
        ranks = self._ranks
        self._questions = Questions(
            host.board, host.remote, ranks, [member.pid for member in generation.members], self.send
        )
        self.traces = TraceRelay(host.board, host.remote, ranks, index == HUB, self.send, self.send_all)
        self._bell, self._poll = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), select.poll()
        self._deaths = {fd: rank for rank, fd in host.peers.fds.items() if rank != generation.hosts[index][0]}
        for fd in (self._bell, self.wire.fd, *self._deaths):
            self._poll.register(fd, select.POLLIN)
        if self._monitor is not None:
            self._poll.register(descriptor_of(self._monitor), select.POLLIN)
        self._is_ending, self._watches_wire, self._rung = False, True, 0
        self._thread = threading.Thread(target=self._run, name="horovod-relay", daemon=True)
        host.remote.beat()
        self._thread.start()

    # -- for the engine ------------------------------------------------------------------------------------------

    def send(self, rank: int, messages: Sequence[frames.Message]) -> None:
        """Send messages towards the host of ``rank``, which is another one."""
        host = self._generation.host_of(rank) if self._index == HUB else HUB
        if host not in self.wire.lost:
            self.wire.post((host,), messages)

    def send_all(self, messages: Sequence[frames.Message], but: int = -1) -> None:
        """Send messages to the hub; at the hub, to all other hosts, except ``but``."""
        hosts = [h for h in self.wire.peers if h != but and h not in self.wire.lost]
        if hosts:
            self.wire.post(hosts, messages)

    def has_messages(self) -> bool:
        """Whether messages that were received wait for the engine."""
        return bool(self.requests or self.log)

    def await_clock(self) -> None:
        """Wait, for two seconds at most, until the offset to the clock of rank 0's host is known."""
        if self._index != HUB:
            self._clock.is_known.wait(_CLOCK_S)

    def depart(self, departures: Iterable[frames.RankState]) -> None:
        """Record ranks that have left, after the log before their departure has reached the ranks of this host."""
        for message in departures:
            self._apply(message)

    def close(self) -> None:
        """Send the last states, and end the connection."""
        self._is_ending = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)
        self._thread.join(_END_S)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_ending:
                is_busy = self.traces.is_busy or self._suspects.is_busy
                # An answer may have come while the question was sent, after which nothing else wakes this thread.
                self._await(0.0 if self._is_answered() else _SHORT_TICK_S if is_busy else _TICK_S)
                self._turn()
            deadline = time.monotonic() + _TRACES_S
            self._turn()
            while self._owes_traces() and time.monotonic() < deadline:
                self._await(_SHORT_TICK_S)
                self._turn()
        finally:
            self.wire.close(lambda host: self._suspects.has_ended(host, self._generation.hosts[host][0]))
            self._suspects.close()
            self._context.destroy()
            os.close(self._bell)

    def _await(self, limit_s: float) -> None:
        """Wait until a message or a ring has come, or a process has ended."""
        if self.doorbell is not None and self._watches_wire:
            # Messages wake the engine. If it is busy, the next tick is soon enough.
            self._watches_wire = False
            self._poll.unregister(self.wire.fd)
        for fd, _ in self._poll.poll(limit_s * 1000):
            if fd == self._bell:
                os.eventfd_read(fd)
            elif fd in self._deaths:
                self._note_death(fd)

    def _is_answered(self) -> bool:
        """Whether the clocks are still being compared, and the last question has been answered."""
        return not self._clock.is_known.is_set() and self._clock.samples > self._pinged_after

    def _owes_traces(self) -> bool:
        """Whether rank 0 still listens, and events of another rank of this host will come."""
        if HUB in self.wire.greeted or HUB in self.wire.lost:
            return False
        others = [(index, rank) for index, rank in enumerate(self._ranks) if index != self._control.rank]
        return any(
            self.traces.owes(rank)
            and self._control.state_of(index) != Presence.FAILED
            and not self._neighbours.has_ended(rank)
            for index, rank in others
        )

    def _turn(self) -> None:
        self._remote.beat()
        self.wire.pump()
        while self._monitor is not None and has_more(self._monitor):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                self.wire.hang_up(HUB)
        self._note_states()
        for host, how in self._suspects.settled(self._is_ending):
            self._give_up(host, how)
        self._catch_up()
        questions = self._questions.news()
        self.traces.look()  # first: a question may concern a recording that rank 0 began before it asked
        self._questions.look(questions)
        if time.monotonic() - self._pinged_s >= (_PING_S if self._clock.is_known.is_set() else 0.0):
            self._pinged_s, self._pinged_after = time.monotonic(), self._clock.samples
            self.send_all([frames.Ping(time.monotonic_ns())])
        if (self.requests or self.log or self.is_owed()) and not self._is_ending:
            self._control.ring(self._control.rank)
        if self.doorbell is not None and self._rung != self.doorbell.heard():
            self._rung = self.doorbell.heard()
            self.doorbell.rouse()

    def _note_states(self) -> None:
        """Send changes in the states of this host's ranks to the other hosts."""
        news = []
        for index, rank in enumerate(self._ranks):
            state, cause = self._control.state_of(index), self._control.cause_of(index)
            if self._told.get(rank) != (state, cause):
                self._told[rank] = (state, cause)
                reason = self._board.reason(rank) if state >= Presence.LEFT else None
                news.append(frames.RankState(rank, state, cause, reason=reason))
        if news:
            self.send_all(news)

    def _note_death(self, fd: int) -> None:
        self._poll.unregister(fd)
        rank = self._deaths.pop(fd)
        self._note_states()
        if self._told[rank][0] < Presence.LEFT:
            self.send_all([frames.RankState(rank, remote_ranks.DEAD, fate=self._neighbours.fate(rank))])

    def _catch_up(self) -> None:
        """Record departures that have waited for too long behind a log that a busy engine does not read."""
        departures = [message for message in tuple(self.log) if isinstance(message, frames.RankState)]
        if not departures:
            self._behind = (0, 0.0)
        elif self._behind[0] != id(departures[0]):
            self._behind = (id(departures[0]), time.monotonic())
        elif time.monotonic() - self._behind[1] > _BEHIND_S:
            self.depart(departures)

    # -- received messages, under the wire's lock ----------------------------------------------------------------

    def _take(self, host: int, message: frames.Message) -> None:
        self._heard_s[host] = time.monotonic()
        is_hub = self._index == HUB
        match message:
            case frames.Declare() | frames.Submit() | frames.Leave() | frames.DeclareGroup() | frames.SubmitGroups():
                if host != HUB and self._speaks_for(host, message.rank):
                    self.requests.append(message)
            case LogEntry():
                if not is_hub:
                    self.log.append(message)
            case frames.Payload():
                if self.mailbox is not None and self._speaks_for(host, message.rank):
                    self.mailbox.put(message.rank, message.note, message.data)
                    if is_hub:
                        self.send_all([message], but=host)
            case frames.RankState():
                self._take_state(host, message)
            case frames.Question() | frames.Answer() | frames.Kernel():
                if max(message.rank, message.asker) < self._generation.size:
                    self._questions.take(message)
            case frames.StartTrace():
                self.traces.take(host, message)
            case frames.Trace() | frames.Told() | frames.Arrivals():
                if self._speaks_for(host, message.rank):
                    self.traces.take(host, message)
            case frames.Ping():
                self.wire.post((host,), [frames.Pong(message.sent_ns, time.monotonic_ns())])
            case frames.Pong():
                self._clock.note(message.sent_ns, message.at_ns, time.monotonic_ns())
                if not is_hub:
                    self._remote.offset_ns = self._clock.offset_ns
            case frames.Bye():
                self._part_from(host)

    def _speaks_for(self, host: int, rank: int) -> bool:
        """Whether a host may speak for a rank: the hub for all other hosts, the others for their own ranks."""
        if rank >= self._generation.size:
            return False
        return rank not in self._ranks if host == HUB else rank in self._generation.hosts[host]

    def _take_state(self, host: int, message: frames.RankState) -> None:
        if not self._speaks_for(host, message.rank):
            return
        if self._index == HUB:
            self.send_all([message], but=host)
        if self._index != HUB and message.state == Presence.LEFT:
            # The rank left after the last entry of the log so far.
            self._departing.add(message.rank)
            self.log.append(message)
        else:
            self._apply(message)

    def _apply(self, message: frames.RankState) -> None:
        if message.reason is not None:
            self._board.give_reason(message.reason, message.rank)
        self._remote.set_state(message.rank, message.state, message.cause, message.fate)
        if not self._is_ending:
            self._control.ring_all(range(self._control.size))

    def _lose(self, host: int, why: str) -> None:
        """Handle the end of the connection with a host."""
        if host in self.wire.lost:
            return
        self.wire.lost.add(host)
        silent_s = time.monotonic() - self._heard_s[host]
        leader = self._generation.hosts[host][0]
        name = self._generation.members[leader].host
        if leader in self._departing or self._remote.state_of(leader) == Presence.LEFT:
            self._part_from(host)
            return
        if why:
            self._give_up(host, f"is lost: the connection with host {name} was closed, because {why}")
        elif silent_s > min(_SILENT_S, self._timeout_s * _SILENT_PART):
            self._give_up(
                host,
                f"is lost: host {name} has not answered for {silent_s:.0f} s (limit: HOROVOD_HOST_TIMEOUT="
                f"{self._timeout_s:g}). It has lost its power or its network, or its first rank, rank {leader}, is "
                "stopped",
            )
        else:
            self._suspects.note(host, leader)

    def _give_up(self, host: int, how: str) -> None:
        """Record that the leader of a host is lost, and all ranks of that host with it."""
        ranks, describe = self._generation.hosts[host], self._generation.describe
        leader, name = ranks[0], self._generation.members[ranks[0]].host
        how = how or f"died: its connection ended, and host {name} cannot be reached without it"
        lost = [frames.RankState(leader, remote_ranks.DEAD, fate=f"{describe(leader)} {how}")]
        if self._index == HUB:
            self.traces.end(ranks)
            lost += [
                frames.RankState(rank, remote_ranks.DEAD, leader, f"{describe(rank)} is lost with {name}")
                for rank in ranks[1:]
            ]
            self.send_all(lost, but=host)
        for message in lost:
            self._apply(message)

    def _part_from(self, host: int) -> None:
        """Tell the coordinator that no rank of a host takes part any more, because its leader has left.

        The state of a rank and its requests travel separately. So the last request of a rank may be missing although
        its state says that it has left, and a leader that was in the middle of an operation has sent none.
        """
        if self._index != HUB or self._is_ending:
            return
        ranks, describe = self._generation.hosts[host], self._generation.describe
        for rank in ranks:
            state = self._remote.state_of(rank)
            if state > Presence.LEFT:
                continue
            if state == Presence.LEFT:
                reason = (self._board.reason(rank) or b"").decode(errors="replace").partition("\n")[2]
                self.requests.append(frames.Leave(rank, reason or f"{describe(rank)} {LEFT}"))
            elif rank != ranks[0]:
                text = f"{describe(rank)} is out of reach: {describe(ranks[0])}, the first rank of its host, {LEFT}"
                left = frames.RankState(rank, Presence.LEFT, reason=f"\n{text}".encode())
                self.requests.append(frames.Leave(rank, text))
                self.send_all([left], but=host)
                self._apply(left)
        self.traces.end(ranks)
