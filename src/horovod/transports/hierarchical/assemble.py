"""Allgather and broadcast of ranks on several hosts: both build a tensor from a part of each member.

Each rank shows its part to its host, in its own stage. In every round each owner takes a slice of the tensor, sends its
host's part of it to the owners of the same slice on the other hosts, and shows the data that it receives. So each
byte enters each host once. A rank that is alone on its host sends from its tensor, and receives into its result.
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
    """A tensor to build."""

    dtype: str
    source: Buffer  # the elements that this rank has, one-dimensional
    target: Buffer  # the result, one-dimensional; the same object as `source` if it is written in place
    # element at which each member's part begins, and where the last one ends; in the order of members
    starts: list[int]


class _Part(NamedTuple):
    """The bytes of the tensor that a member has in a slice."""

    member: int
    first: int
    last: int


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
    """Copy the root's tensors to all members."""
    response = entry.response
    root = response.members.index(response.requests[0].root)
    for index, spec in enumerate(response.requests[0].tensors):
        source, target = work.inputs[index], work.allocate(index, spec.shape)
        flat = source.reshape(-1)
        starts = [0] * (root + 1) + [spec.count] * (len(response.members) - root)
        tensor = _Tensor(spec.dtype, flat, flat if target is source else target.reshape(-1), starts)
        _Assembly(team, response.members, work.kernels, tensor).run()


class _Assembly:
    """One rank's share of building one tensor."""

    def __init__(self, team: Team, members: Sequence[int], kernels: str, tensor: _Tensor) -> None:
        self._team, self._kernels, self._tensor = team, kernels, tensor
        self._library = kernels_named(kernels)
        self._itemsize = ITEMSIZE[tensor.dtype]
        self._mine = list(members).index(team.rank)
        of_host = {rank: host for host, ranks in enumerate(team.hosts) for rank in ranks}
        self._host_of = [of_host[rank] for rank in members]
        self._local = {member: team.local.index(rank) for member, rank in enumerate(members) if rank in team.local}
        self._is_alone = len(team.local) == 1
        self._nbytes = tensor.starts[-1] * self._itemsize
        self._moving: dict[int, tuple[Pending, Bytes | None, list[_Part]]] = {}

    def run(self) -> None:
        """Build the tensor; its own part of the result is copied without the stage."""
        tensor, own = self._tensor, self._tensor.starts[self._mine : self._mine + 2]
        if tensor.target is not tensor.source and own[0] < own[1]:
            self._library.copy(tensor.target[own[0] : own[1]], tensor.source[: own[1] - own[0]])
        count = -(-self._nbytes // CHUNK_BYTES)
        self._team.pipeline(count, self._fill, self._send, self._receive, self._collect)

    def _slice(self, k: int, slot: int) -> tuple[int, int]:
        """Return the bytes of the tensor that an owner moves in a round."""
        start = k * CHUNK_BYTES
        lines = -(-min(CHUNK_BYTES, self._nbytes - start) // LINE)
        low, high = part_of(lines, self._team.slots, slot)
        return start + low * LINE, min(start + high * LINE, self._nbytes)

    def _parts(self, low: int, high: int) -> list[_Part]:
        """Return the members' parts of bytes ``low`` to ``high`` of the tensor."""
        starts, itemsize, found = self._tensor.starts, self._itemsize, []
        for member in range(len(starts) - 1):
            first, last = max(low, starts[member] * itemsize), min(high, starts[member + 1] * itemsize)
            if first < last:
                found.append(_Part(member, first, last))
        return found

    def _fill(self, k: int) -> None:
        if self._is_alone:
            return
        tensor, itemsize, stage, start = self._tensor, self._itemsize, self._team.stage, k * CHUNK_BYTES
        for member, first, last in self._parts(start, min(start + CHUNK_BYTES, self._nbytes)):
            if member == self._mine:
                count, at = (last - first) // itemsize, first // itemsize - tensor.starts[member]
                place = stage.view(stage.me, k, first - start, self._kernels, tensor.dtype, count)
                self._library.copy(place, tensor.source[at : at + count])

    def _shown(self, k: int, part: _Part) -> Bytes:
        """Return the memory of a part that a member on this host has."""
        if self._is_alone:
            own = self._tensor.starts[self._mine] * self._itemsize
            memory: Bytes = self._library.raw(self._tensor.source)
            return memory[part.first - own : part.last - own]
        start = k * CHUNK_BYTES
        return self._team.stage.raw(self._local[part.member], k, part.first - start, part.last - start)

    def _room(self, k: int, low: int, high: int) -> Bytes:
        """Return memory of this rank for bytes of the tensor that arrive from other hosts."""
        if self._is_alone:
            memory: Bytes = self._library.raw(self._tensor.target)
            return memory[low:high]
        start = k * CHUNK_BYTES
        return self._team.stage.raw(self._team.stage.me, k, low - start, high - start)

    def _send(self, k: int) -> None:
        team = self._team
        low, high = self._slice(k, team.me)
        if low >= high:
            return
        in_order = self._parts(low, high)
        parts = sorted(in_order, key=lambda part: self._host_of[part.member])
        group, have = team.owners(), {self._host_of[part.member] for part in parts}
        local = [self._shown(k, part) for part in parts if part.member in self._local]
        own = local[0] if len(local) == 1 else np.concatenate([np.empty(0, np.uint8), *local])
        if len(have) == 1:
            data = own if local else self._room(k, low, high)
            self._moving[k] = group.broadcast(data, have.pop()), None, parts
            return
        counts = [0] * len(team.hosts)
        for member, first, last in parts:
            counts[self._host_of[member]] += last - first
        # The engine concatenates the data of the hosts.
        is_direct = self._is_alone and parts == in_order
        received = self._room(k, low, high) if is_direct else np.empty(high - low, np.uint8)
        self._moving[k] = group.gather(own, received, counts), None if is_direct else received, parts

    def _receive(self, k: int) -> None:
        if k not in self._moving:
            return
        moving, received, parts = self._moving.pop(k)
        moving.wait()
        if received is None:
            return
        at = 0
        for member, first, last in parts:
            if member not in self._local:
                self._room(k, first, last)[:] = received[at : at + last - first]
            at += last - first

    def _collect(self, k: int) -> None:
        if self._is_alone:
            return
        tensor, itemsize, stage, start = self._tensor, self._itemsize, self._team.stage, k * CHUNK_BYTES
        for slot in range(self._team.slots):
            for member, first, last in self._parts(*self._slice(k, slot)):
                if member != self._mine:
                    count, at = (last - first) // itemsize, first // itemsize
                    place = self._local.get(member, slot)
                    shown = stage.view(place, k, first - start, self._kernels, tensor.dtype, count)
                    self._library.copy(tensor.target[at : at + count], shown)
