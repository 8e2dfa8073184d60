"""Engines of ranks on several hosts in one process, on a ``Stage``: leaders, relays and all, without sockets."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from interleaving import Stage
from pairs import Ranks

from horovod import config as configuration
from horovod.config import Config
from horovod.engine.engine import Engine
from horovod.engine.link import Link
from horovod.engine.ports import SILENT
from horovod.links.hosts import channel, link, relay
from horovod.links.hosts.frames import Bye, Message
from horovod.links.hosts.link import HostsBoard
from horovod.links.hosts.relay import Relay
from horovod.links.hosts.remote_ranks import RemoteRanks
from horovod.links.shm.link import Shared
from horovod.rendezvous.hosts import MetHosts
from horovod.rendezvous.messages import HostMeeting
from horovod.rendezvous.protocol import HostEntry
from horovod.transports.local import LocalTransport
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.control import Control
from horovod.transports.shm.mapping import create_memfd
from horovod.world import World

__all__ = ["RELAYED_FILES", "RelayedRanks", "relay_on_stage"]

#: Whose lines are moments.
RELAYED_FILES = frozenset(str(module.__file__) for module in (relay, channel))
_ARENA_BYTES = 32 << 20


class _Wire:
    """Stands in for ``Wire``: messages lie in a queue until the other host looks."""

    def __init__(
        self,
        wires: Any,
        ids: Sequence[bytes],
        index: int,
        take: Callable[[int, Message], None],
        lose: Callable[[int, str], None],
    ) -> None:
        self._wires, self._index, self._take, self._lose = wires.wires, index, take, lose
        self._wires[index] = self
        self.peers = [host for host in range(len(ids)) if host != index] if index == 0 else [0]
        self.incoming: collections.deque[tuple[int, Message]] = collections.deque()
        self.lost: set[int] = set()
        self.greeted: set[int] = set()
        self._is_pumping = False
        self.fd = os.eventfd(0)

    def post(self, hosts: Iterable[int], messages: Sequence[Message]) -> None:
        for host in hosts:
            if host in self._wires and host not in self.greeted:
                self._wires[host].incoming.extend((self._index, message) for message in messages)

    def pump(self) -> None:
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self.incoming:
                host, message = self.incoming.popleft()
                if host in self.lost:
                    continue
                if isinstance(message, Bye):
                    self._part(host)
                self._take(host, message)
        finally:
            self._is_pumping = False

    @property
    def is_readable(self) -> bool:
        """Whether a thread that waits for messages should look; not while another one takes them."""
        return bool(self.incoming) and not self._is_pumping

    def _part(self, host: int) -> None:
        if host not in self.greeted:
            self.post([host], [Bye(False)])
            self.greeted.add(host)

    def close(self, has_ended: object = None) -> None:
        self.pump()
        for host in self.peers:
            self._part(host)
        os.close(self.fd)


def relay_on_stage(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    """Let relays that are made from now on wait, and run their threads, on a stage; beside ``on_stage``."""

    def wait(self: Relay, limit_s: float) -> None:
        wire: Any = self.wire
        stage.block(lambda: self._is_ending or wire.is_readable, limit_s)

    patch.setattr(relay, "threading", SimpleNamespace(Thread=stage.thread))
    patch.setattr(Relay, "await_clock", lambda self: None)
    patch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: stage.clock, monotonic_ns=lambda: 1))
    patch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: stage.clock))
    patch.setattr(Relay, "_await", wait)
    patch.setattr(relay, "Wire", _Wire)


class RelayedRanks(Ranks):
    """A job on several hosts, whose ranks agree on operations and move nothing.

    Args:
        stage: on which they play.
        hosts: number of ranks on each host.
    """

    def __init__(self, stage: Stage, hosts: Sequence[int]) -> None:
        settings = configuration.load({})
        self.stage = stage
        first = [sum(hosts[:index]) for index in range(len(hosts))]
        ranks = [list(range(start, start + count)) for start, count in zip(first, hosts, strict=True)]
        roster = [HostEntry(f"host-{index}", own, [os.getpid()] * len(own), "") for index, own in enumerate(ranks)]
        wires = SimpleNamespace(
            wires={}, context=SimpleNamespace(destroy=lambda: None), get_monitor_socket=lambda events: None
        )
        links = [one for index in range(len(hosts)) for one in _links(stage, roster, index, wires, settings)]
        self.engines = [Engine(one, settings, SILENT) for one in links]
        for engine in self.engines:
            engine.start()


def _links(stage: Stage, hosts: Sequence[HostEntry], index: int, wires: Any, settings: Config) -> list[Link]:
    """Assemble the links of the ranks of one host."""
    ranks, size = hosts[index].ranks, sum(len(host.ranks) for host in hosts)
    local_size = len(ranks)
    page = HostsBoard.nbytes(local_size, size)
    control_fd = create_memfd("horovod-control-test", page + RemoteRanks.nbytes(size))
    arena_fds = [create_memfd("horovod-arena-test", _ARENA_BYTES) for _ in ranks]

    @contextlib.contextmanager
    def sharing(world: World, settings: Config, page_bytes: int, rank: int) -> Iterator[Shared]:
        control = Control(control_fd, world.local_rank, local_size, 4 * local_size)
        # Views of one page differ, so a word is known by its host and rank.
        stage.words.update(zip(control._bell_address, ranks, strict=True))
        arenas = [Arena(fd, _ARENA_BYTES) for fd in arena_fds]
        pid_fds, pids = [os.pidfd_open(os.getpid()) for _ in ranks], [os.getpid()] * local_size
        names, sizes = [hosts[index].hostname] * local_size, [_ARENA_BYTES] * local_size
        meeting = HostMeeting(control_fd, arena_fds, sizes, pid_fds, pids, names, ranks)
        yield Shared(meeting, control, arenas)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "sharing", sharing)
            patch.setattr(link, "meet_hosts", lambda *_, **options: MetHosts(list(hosts), wires, index, ""))
            patch.setattr(link, "_transport_of", lambda *_: LocalTransport())
            worlds = [
                World(rank, size, local_rank, local_size, index, len(hosts), hosts[index].hostname, "none", "job", b"")
                for local_rank, rank in enumerate(ranks)
            ]
            return [link.assemble(world, settings, 1, SILENT) for world in worlds]
    finally:
        for fd in (control_fd, *arena_fds):
            os.close(fd)
