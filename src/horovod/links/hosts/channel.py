"""Requests and log of a job on several hosts, where they meet on each: at the leader of the host.

It reads the requests of its host and writes the host's log like the rank that serves a host alone; only that it hands
the requests to the coordinator on another host, or is that coordinator's hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.core.coordinator import Coordinator, Declared, Run
from horovod.core.requests import Request
from horovod.engine.ports import LogEntry
from horovod.links.hosts import frames
from horovod.links.hosts.relay import Relay
from horovod.links.shm.channel import CoordinatorChannel
from horovod.transports.shm.control import Control

__all__ = ["HubDecider", "LeaderChannel", "RemoteDecider"]


class RemoteDecider:
    """Stands in for the coordinator on another host than its own.

    Args:
        relay: the connection with it.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._log = relay.log
        self._batch: list[frames.Message] = []
        self._departures: list[frames.State] = []

    def declare(self, rank: int, signature: int, request: Request) -> None:
        """Let ``signature`` stand for ``request`` when ``rank`` submits it."""
        self._batch.append(frames.Declare(rank, signature, request))

    def submit(self, rank: int, signature: int, note: int) -> None:
        """Take one submission of ``rank``."""
        self._batch.append(frames.Submit(rank, signature, note))

    def leave(self, rank: int, reason: str) -> None:
        """Note that ``rank`` takes part no more."""
        self._batch.append(frames.Leave(rank, reason))

    def has_news(self) -> bool:
        """Whether ``take`` has something."""
        if self._log or self._batch:
            return True
        self._relay.wire.pump()
        return bool(self._log)

    def take(self) -> list[LogEntry]:
        """Send what was asked for, and return the log entries since the last call."""
        if self._batch:
            batch, self._batch = self._batch, []
            self._relay.send_all(batch)
        entries: list[LogEntry] = []
        log = self._log
        while log:
            message = log.popleft()
            if isinstance(message, frames.Run):
                entries.append(Run(message.ids, message.notes))
            elif isinstance(message, frames.Declared):
                entries.append(Declared(message.id, message.response))
            elif isinstance(message, frames.State):
                self._departures.append(message)
        return entries

    def published(self) -> None:
        """Let those leave of whom the log has said all."""
        if self._departures:
            departures, self._departures = self._departures, []
            self._relay.depart(departures)


class HubDecider:
    """The coordinator, for the ranks of all hosts.

    Args:
        coordinator: the coordinator.
        relay: the connections with the other hosts.
    """

    def __init__(self, coordinator: Coordinator, relay: Relay) -> None:
        self._coordinator = coordinator
        self._relay = relay
        self._requests = relay.requests
        self.declare, self.submit, self.leave = coordinator.declare, coordinator.submit, coordinator.leave

    def has_news(self) -> bool:
        """Whether other hosts have asked for something."""
        if self._requests:
            return True
        self._relay.wire.pump()
        return bool(self._requests)

    def take(self) -> list[LogEntry]:
        """Take what other hosts have asked for; return the log entries since the last call, and send them to all."""
        requests = self._requests
        while requests:
            self._serve(requests.popleft())
        entries = self._coordinator.take()
        if entries:
            self._relay.send_all([_told(entry) for entry in entries])
        return entries

    def published(self) -> None:
        """Nothing waits for that here."""

    def _serve(self, message: frames.Message) -> None:
        if isinstance(message, frames.Submit):
            self._coordinator.submit(message.rank, message.signature, message.note)
        elif isinstance(message, frames.Declare):
            self._coordinator.declare(message.rank, message.signature, message.request)
        elif isinstance(message, frames.Leave):
            self._coordinator.leave(message.rank, message.reason)


class LeaderChannel(CoordinatorChannel):
    """The path of a host's leader; see ``Channel``.

    Args:
        control: the control page of the host.
        decider: decides, or asks who does.
        ranks: the ranks of the host.
    """

    def __init__(self, control: Control, decider: RemoteDecider | HubDecider, ranks: Sequence[int]) -> None:
        super().__init__(control, decider, ranks)
        self._decider = decider

    def has_news(self) -> bool:
        """Whether ``next`` has something, or there is something to relay."""
        return super().has_news() or self._decider.has_news()

    def _serve(self) -> None:
        super()._serve()
        self._publish()

    def _publish(self) -> None:
        super()._publish()
        self._decider.published()


def _told(entry: LogEntry) -> frames.Message:
    if isinstance(entry, Run):
        return frames.Run(entry.ids, entry.notes)
    return frames.Declared(entry.id, entry.response)
