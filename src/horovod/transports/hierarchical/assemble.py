"""Allgather and broadcast of ranks on several hosts: all assemble the same tensor, of which each rank has a part.

Each owner assembles its slice of a stretch of the tensor: its host's ranks put their parts there, it sends them to all
other hosts' owners of the same slice and takes theirs. So what a rank has enters each host once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod.core.requests import ITEMSIZE
from horovod.splits import part_of
from horovod.transports.base import Entry, Work
from horovod.transports.groups import Bytes, Pending
from horovod.transports.hierarchical.stage import CHUNK_BYTES
from horovod.transports.hierarchical.team import Team
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import LINE

__all__ = ["allgather", "broadcast"]


class _Tensor(NamedTuple):
    """A tensor to assemble.

    Attributes:
        dtype: its dtype.
        source: what this rank has of it.
        target: where it is to be.
        starts: element at which each member's part begins, and where the last one ends; in the order of members.
    """

    dtype: str
    source: Buffer
    target: Buffer
    starts: list[int]


def allgather(team: Team, entry: Entry, work: Work) -> None:
    """Concatenate every member's rows."""
    response = entry.response
    for index, spec in enumerate(response.requests[0].tensors):
        specs = [response.request_of(i).tensors[index] for i in range(len(response.members))]
        rows = sum(s.shape[0] for s in specs)
        target = work.allocate(index, (rows, *spec.shape[1:])).reshape(-1)
        starts = np.cumsum([0, *(s.count for s in specs)]).tolist()
        tensor = _Tensor(spec.dtype, work.inputs[index].reshape(-1), target, starts)
        _Assembly(team, response.members, work.kernels, tensor).run()


def broadcast(team: Team, entry: Entry, work: Work) -> None:
    """Copy the root's tensors to everybody."""
    response = entry.response
    root = response.members.index(response.requests[0].root)
    for index, spec in enumerate(response.requests[0].tensors):
        target = work.allocate(index, spec.shape).reshape(-1)
        starts = [0] * (root + 1) + [spec.count] * (len(response.members) - root)
        tensor = _Tensor(spec.dtype, work.inputs[index].reshape(-1), target, starts)
        _Assembly(team, response.members, work.kernels, tensor).run()


class _Assembly:
    """One rank's part of assembling one tensor."""

    def __init__(self, team: Team, members: Sequence[int], kernels: str, tensor: _Tensor) -> None:
        self._team, self._kernels, self._tensor = team, kernels, tensor
        self._library = kernels_named(kernels)
        self._itemsize = ITEMSIZE[tensor.dtype]
        self._mine = list(members).index(team.rank)
        of_host = {rank: host for host, ranks in enumerate(team.hosts) for rank in ranks}
        self._host_of = [of_host[rank] for rank in members]
        self._nbytes = tensor.starts[-1] * self._itemsize
        self._moving: dict[int, tuple[Pending, Bytes | None, list[list[tuple[int, int]]]]] = {}

    def run(self) -> None:
        """Assemble it."""
        count = -(-self._nbytes // CHUNK_BYTES)
        self._team.pipeline(count, self._fill, self._send, self._receive, self._collect)

    def _slice(self, k: int, slot: int) -> tuple[int, int]:
        """Return the bytes of the tensor that an owner assembles in a round."""
        start = k * CHUNK_BYTES
        lines = -(-min(CHUNK_BYTES, self._nbytes - start) // LINE)
        low, high = part_of(lines, self._team.slots, slot)
        return start + low * LINE, min(start + high * LINE, self._nbytes)

    def _parts(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Return which members have what of some bytes of the tensor: (member, first byte, byte behind the last)."""
        starts, itemsize, found = self._tensor.starts, self._itemsize, []
        for member in range(len(starts) - 1):
            first, last = max(low, starts[member] * itemsize), min(high, starts[member + 1] * itemsize)
            if first < last:
                found.append((member, first, last))
        return found

    def _fill(self, k: int) -> None:
        tensor, itemsize, stage = self._tensor, self._itemsize, self._team.stage
        own = tensor.starts[self._mine]
        for slot in range(self._team.slots):
            for member, first, last in self._parts(*self._slice(k, slot)):
                if member != self._mine:
                    continue
                count, at = (last - first) // itemsize, first // itemsize - own
                place = stage.view(slot, k, first - k * CHUNK_BYTES, self._kernels, tensor.dtype, count)
                self._library.copy(place, tensor.source[at : at + count])

    def _send(self, k: int) -> None:
        team, stage, start = self._team, self._team.stage, k * CHUNK_BYTES
        low, high = self._slice(k, team.me)
        if low >= high:
            return
        of_host: list[list[tuple[int, int]]] = [[] for _ in team.hosts]
        for member, first, last in self._parts(low, high):
            of_host[self._host_of[member]].append((first - start, last - start))
        have = [host for host, parts in enumerate(of_host) if parts]
        group = team.owners()
        if len(have) == 1:
            data = stage.raw(team.me, k, low - start, high - start)
            self._moving[k] = group.broadcast(data, have[0]), None, of_host
            return
        parts = [stage.raw(team.me, k, first, last) for first, last in of_host[team.here]]
        part = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.uint8)
        received = np.empty(high - low, np.uint8)
        counts = [sum(last - first for first, last in ranges) for ranges in of_host]
        self._moving[k] = group.gather(part, received, counts), received, of_host

    def _receive(self, k: int) -> None:
        if k not in self._moving:
            return
        team, at = self._team, 0
        moving, received, of_host = self._moving.pop(k)
        moving.wait()
        if received is None:
            return
        for host, ranges in enumerate(of_host):
            for first, last in ranges:
                if host != team.here:
                    team.stage.raw(team.me, k, first, last)[:] = received[at : at + last - first]
                at += last - first

    def _collect(self, k: int) -> None:
        tensor, itemsize, stage = self._tensor, self._itemsize, self._team.stage
        for slot in range(self._team.slots):
            low, high = self._slice(k, slot)
            if low < high:
                count, at = (high - low) // itemsize, low // itemsize
                shown = stage.view(slot, k, low - k * CHUNK_BYTES, self._kernels, tensor.dtype, count)
                self._library.copy(tensor.target[at : at + count], shown)
