"""Requests and log of a job on several hosts, at the leader of each host.

The leader reads the requests of its host and writes the host's log, as on one host. It sends the requests to the
coordinator on another host, or runs the coordinator itself. Repeated submissions of all its ranks are sent as one; see
``horovod.core.gathering``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from horovod.core.coordinator import LogEntry
from horovod.core.gathering import Gathering
from horovod.core.hub import HubCoordinator
from horovod.core.requests import NO_NOTE
from horovod.links.hosts import frames
from horovod.links.hosts.relay import Relay
from horovod.links.shm.channel import CoordinatorChannel
from horovod.transports.shm.control import Control

__all__ = ["HubDecider", "LeaderChannel", "RemoteDecider"]

#: Bytes of data that the hub sends together with its decision, which saves a message; more goes ahead.
_FEW_BYTES = 8192
#: How long to hold submissions back for the other ranks of the host, before they are sent rank by rank.
_KEPT_S = 0.1


class _Keeper:
    """The common part of both deciders: gather the submissions of this host's ranks."""

    def __init__(self, gathering: Gathering, relay: Relay, batch: list[frames.Message]) -> None:
        self._gathering = gathering
        self._batch = batch
        self._relay = relay
        self._look_s = 0.0
        self.declare, self.submit, self.leave = gathering.declare, gathering.submit, gathering.leave
        if relay.mailbox is not None:
            self.submit = self._submit
        relay.is_owed = self._is_owed

    def _submit(self, rank: int, signature: int, note: int) -> None:
        """Take one submission of this rank, whose data goes ahead of it."""
        if note != NO_NOTE:
            assert self._relay.mailbox is not None
            self._send_data(frames.Payload(rank, note, self._relay.mailbox.data(rank, note)))
        self._gathering.submit(rank, signature, note)

    def _send_data(self, message: frames.Payload) -> None:
        """Send the data of a submission: before the submission, or in one message with it."""
        self._batch.append(message)

    def _is_owed(self) -> bool:
        """Whether a submission has been held back for so long that the coordinator should know."""
        return self._gathering.is_holding and time.monotonic() >= self._look_s

    def _collect(self) -> None:
        if self._is_owed():
            self._look_s = time.monotonic() + _KEPT_S
            self._gathering.collect_old()
        else:
            self._gathering.collect()


class RemoteDecider(_Keeper):
    """The proxy of the coordinator, on hosts other than the coordinator's."""

    def __init__(self, relay: Relay, ranks: Sequence[int]) -> None:
        batch: list[frames.Message] = []
        super().__init__(Gathering(ranks, batch.append), relay, batch)
        self._log = relay.log
        self._departures: list[frames.RankState] = []

    def has_news(self) -> bool:
        """Whether ``take`` has something to send or to return."""
        if self._log or self._batch:
            return True
        self._relay.wire.pump()
        return bool(self._log) or self._is_owed()

    def take(self) -> list[LogEntry]:
        """Send the requests, and return the log entries since the last call."""
        self._collect()
        self._send()
        entries: list[LogEntry] = []
        log = self._log
        while log:
            message = log.popleft()
            if isinstance(message, LogEntry):
                entries.append(message)
            else:
                self._departures.append(message)
        self._gathering.observe(entries)
        return entries

    def published(self) -> None:
        """Record the ranks that have left, now that the log before their departure is published."""
        if self._departures:
            departures, self._departures = self._departures, []
            self._relay.depart(departures)

    def _send(self) -> None:
        if self._batch:
            self._relay.send_all(self._batch)
            self._batch.clear()


class HubDecider(_Keeper):
    """The coordinator, for the ranks of all hosts."""

    def __init__(self, coordinator: HubCoordinator, relay: Relay, ranks: Sequence[int]) -> None:
        super().__init__(Gathering(ranks, coordinator.take_message), relay, [])
        self._coordinator = coordinator
        self._requests = relay.requests

    def has_news(self) -> bool:
        """Whether requests of other hosts have arrived."""
        if self._requests:
            return True
        self._relay.wire.pump()
        return bool(self._requests) or self._is_owed()

    def take(self) -> list[LogEntry]:
        """Take the requests of other hosts; return the log entries since the last call, and send them to all hosts."""
        self._collect()
        requests = self._requests
        while requests:
            self._coordinator.take_message(requests.popleft())
        entries = self._coordinator.take()
        if entries:
            self._gathering.observe(entries)
            self._relay.send_all([*self._batch, *entries])
            self._batch.clear()
        return entries

    def published(self) -> None:
        """Do nothing: at the hub no departure waits for the log."""

    def _send_data(self, message: frames.Payload) -> None:
        if len(message.data) <= _FEW_BYTES:
            self._batch.append(message)
        else:
            self._relay.send_all([message])


class LeaderChannel(CoordinatorChannel):
    """The path of a host's leader; see ``Channel``."""

    def __init__(self, control: Control, decider: RemoteDecider | HubDecider, ranks: Sequence[int]) -> None:
        super().__init__(control, decider, ranks)
        self._decider = decider

    def has_news(self) -> bool:
        """Whether ``next`` has an entry, or there are messages to relay."""
        return super().has_news() or self._decider.has_news()

    def _serve(self) -> None:
        super()._serve()
        self._publish()

    def _publish(self) -> None:
        super()._publish()
        if not self._hidden:
            self._decider.published()
