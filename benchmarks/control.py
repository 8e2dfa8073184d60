"""Cost of coordination in a job of many hosts, with simulated ranks and without a network.

python benchmarks/control.py [RANKS [RANKS_PER_HOST [TENSORS]]]

Leaders, frames and coordinator are the real ones.
"""

from __future__ import annotations

import collections
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from horovod.core.coordinator import Coordinator, LogEntry
from horovod.core.generation import Generation, Member
from horovod.core.hub import HubCoordinator
from horovod.core.requests import NO_NOTE, Kind, Request, TensorSpec
from horovod.links.hosts import frames
from horovod.links.hosts.channel import HubDecider, RemoteDecider

__all__ = ["Simulation"]

#: Steps after which everything has a number, and how many are measured.
_WARMUP, _STEPS = 3, 50


class _Relay:
    """Keeps the frames that a leader would send."""

    mailbox = None

    def __init__(self) -> None:
        self.requests: collections.deque[frames.Message] = collections.deque()
        self.log: collections.deque[frames.Message] = collections.deque()
        self.sent: list[bytes] = []

    def send_all(self, messages: Sequence[frames.Message]) -> None:
        self.sent.append(frames.numbered(0, frames.encode(messages)))


class Simulation:
    """A job whose ranks submit the same tensors in each step.

    Args:
        ranks: how many.
        hosts: on how many hosts, which divides ``ranks``.
        tensors: how many each rank submits in a step.
    """

    def __init__(self, ranks: int, hosts: int, tensors: int) -> None:
        local = ranks // hosts
        self._hosts = [range(first, first + local) for first in range(0, ranks, local)]
        self.generation = Generation([Member(0, "simulated")] * ranks, hosts=self._hosts)
        self._relays: list[Any] = [_Relay() for _ in self._hosts]
        self._hub = HubDecider(HubCoordinator(self.generation), self._relays[0], self._hosts[0])
        self._leaders: list[HubDecider | RemoteDecider] = [self._hub]
        for relay, own in zip(self._relays[1:], self._hosts[1:], strict=True):
            self._leaders.append(RemoteDecider(relay, own))
        spec = (TensorSpec("float32", (1024,)),)
        names = [f"allreduce.gradient.{i}" for i in range(tensors)]
        self.requests = [Request(name, Kind.ALLREDUCE, tensors=spec, fuse_class="float32") for name in names]
        for leader, own in zip(self._leaders, self._hosts, strict=True):
            for rank in own:
                for signature, request in enumerate(self.requests):
                    leader.declare(rank, signature, request)

    def submit(self, host: int) -> None:
        """Let the ranks of a host submit a step, as its leader finds it in their rings."""
        for rank in self._hosts[host]:
            for signature in range(len(self.requests)):
                self._leaders[host].submit(rank, signature, NO_NOTE)

    def ask(self, host: int) -> list[bytes]:
        """Return the frames by which the leader of a host passes that on."""
        self._leaders[host].take()
        sent, self._relays[host].sent = self._relays[host].sent, []
        return list(sent)

    def decide(self, asked: Sequence[bytes]) -> list[LogEntry]:
        """Do what the hub does in a step: read frames, decide, write frames; return the log."""
        requests = self._relays[0].requests
        for frame in asked:
            requests.extend(frames.decode(frame))
        return self._hub.take()

    def bring(self) -> list[bytes]:
        """Let all hosts have what the hub has sent; return what it has sent to all."""
        relay = self._relays[0]
        sent: list[bytes] = relay.sent
        relay.sent = []
        for host in range(1, len(self._hosts)):
            for frame in sent:
                self._relays[host].log.extend(frames.decode(frame))
            self._leaders[host].take()
        return sent


@dataclass
class _Step:
    own_s: float
    leader_s: float
    hub_s: float
    up: int
    down: int


def _step(simulation: Simulation, hosts: int) -> _Step:
    own_s = _timed(lambda: simulation.submit(0))
    asked: list[bytes] = []

    def gather(host: int) -> None:
        simulation.submit(host)
        asked.extend(simulation.ask(host))

    leader_s = median(_timed(lambda host=host: gather(host)) for host in range(1, hosts))  # type: ignore[misc]
    log: list[LogEntry] = []
    hub_s = _timed(lambda: log.extend(simulation.decide(asked)))
    assert sum(len(entry.ids) for entry in log if entry.response is None) == len(simulation.requests)
    sent = simulation.bring()
    return _Step(own_s, leader_s, hub_s, sum(map(len, asked)), sum(map(len, sent)))


def _one_by_one(simulation: Simulation, local: int) -> tuple[float, int]:
    """Return what a step takes at the coordinator that knows no hosts, fed rank by rank; and the bytes of that."""
    generation = Generation(simulation.generation.members)
    coordinator = Coordinator(generation)
    tensors = range(len(simulation.requests))
    for rank in range(generation.size):
        for signature in tensors:
            coordinator.declare(rank, signature, simulation.requests[signature])
    asked = []
    for first in range(0, generation.size, local):
        batch = [frames.Submit(rank, s, NO_NOTE) for rank in range(first, first + local) for s in tensors]
        asked.append(frames.numbered(0, frames.encode(batch)))

    def decide() -> None:
        for frame in asked:
            for message in frames.decode(frame):
                assert isinstance(message, frames.Submit)
                coordinator.submit(message.rank, message.signature, message.note)
        coordinator.take()

    decide()
    return min(_timed(decide) for _ in range(3)), sum(map(len, asked[1:]))


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main(ranks: int, local: int, tensors: int) -> None:
    """Measure a cached step in one process, and print what each part takes."""
    hosts = ranks // local
    if hosts < 2 or ranks % local:
        sys.exit(f"expected several hosts of {local} ranks, got {ranks} ranks")
    simulation = Simulation(ranks, hosts, tensors)
    for _ in range(_WARMUP):
        _step(simulation, hosts)
    gc.collect()
    steps = [_step(simulation, hosts) for _ in range(_STEPS)]
    one_by_one_s, one_by_one_bytes = _one_by_one(simulation, local)
    up, down = steps[-1].up, steps[-1].down
    for name, spent, nbytes in (
        ("hub: read, decide, write", [step.hub_s for step in steps], f"{up} B in, {down} B out to each host"),
        ("hub: its own host's ranks", [step.own_s for step in steps], ""),
        ("leader of another host", [step.leader_s for step in steps], f"{up // (hosts - 1)} B out, {down} B in"),
        ("hub, if every rank were a record", [one_by_one_s], f"{one_by_one_bytes} B in"),
    ):
        print(f"{name:33s} {median(spent) * 1e6:9.1f} us  {nbytes}")


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["512", "8", "200"][len(sys.argv) - 1 :])))
