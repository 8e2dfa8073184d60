"""Collectives of several hosts: shared memory inside a host, an engine of ``groups`` between hosts.

See ``allreduce``, ``assemble``, ``reducescatter`` and ``direct``. A rank that is alone on its host, or that must not
use shared memory, has private buffers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from horovod.core.requests import Kind, ReduceOp, Request
from horovod.errors import InitError
from horovod.transports.base import Entry, Transport, Work, sum_class
from horovod.transports.groups import Groups
from horovod.transports.hierarchical import assemble, direct, reducescatter
from horovod.transports.hierarchical.allreduce import SCRATCH_BYTES, allreduce
from horovod.transports.hierarchical.mailbox import Mailbox, is_small
from horovod.transports.hierarchical.stage import STAGE_BYTES, Memory, Stage, in_place
from horovod.transports.hierarchical.streams import streams_of
from horovod.transports.hierarchical.team import Team
from horovod.transports.libraries import kernels_named, on_one_thread
from horovod.transports.local import run_alone
from horovod.transports.results import ResultPool
from horovod.transports.shm.transport import ShmTransport
from horovod.transports.topology import Topology

__all__ = ["ROUTINES", "HierarchicalTransport"]

_Batch = Sequence[tuple[Entry, Work]]

#: From this size on, reducing a tensor of the arena in place saves more than meeting seldom.
_IN_PLACE_BYTES = 256 << 10


class HierarchicalTransport(Transport):
    """See ``Transport``.

    Raises:
        InitError: the arena has no room.
    """

    fresh: tuple[int, ...] = ()

    def __init__(
        self,
        topology: Topology,
        groups: Groups,
        shm: ShmTransport | None = None,
        indices: dict[int, int] | None = None,
        device_groups: Groups | None = None,
        mailbox: Mailbox | None = None,
        closes: ShmTransport | None = None,
    ) -> None:
        self.name = groups.name if shm is None else f"{shm.name} and {groups.name}"
        self._topology = topology if shm is not None else topology.flat()
        self._groups, self._shm, self._mailbox, self._closes = groups, shm, mailbox, closes
        self._device_groups = groups if device_groups is None else device_groups
        self._indices = indices or {rank: index for index, rank in enumerate(self._topology.mine)}
        self._is_awaited = False
        self._teams: dict[tuple[tuple[int, ...], Groups], Team] = {}
        self._scratch = Memory(None, 0, SCRATCH_BYTES)
        self._last: tuple[Sequence[int], int] = ((), 0)
        self._results = ResultPool()
        if shm is None:
            self._memories = {topology.rank: Memory(None, 0, STAGE_BYTES)}
        else:
            # The first allocation has the same offset in every arena. It is never freed: other ranks may still read it.
            try:
                start = shm.arena.take(STAGE_BYTES)
            except MemoryError as error:
                raise InitError(
                    f"the arena has no room for {STAGE_BYTES >> 20} MiB of buffers between hosts: {error}"
                ) from None
            self._memories = {
                rank: Memory(shm.arenas[index].memory, start, STAGE_BYTES)
                for rank, index in self._indices.items()
                if rank in self._topology.mine
            }

    @property
    def is_awaited(self) -> bool:
        """Whether a thread of this rank waits for a result."""
        return self._is_awaited

    @is_awaited.setter
    def is_awaited(self, value: bool) -> None:
        self._is_awaited = value
        if self._shm is not None:
            self._shm.is_awaited = value

    def takes(self, device: str, kind: Kind, op: ReduceOp, dtypes: Sequence[str]) -> bool:
        return False

    def allocate(self, nbytes: int) -> Any:
        return bytearray(nbytes) if self._shm is None else self._shm.allocate(nbytes)

    def place(self, addresses: Sequence[int]) -> tuple[int, ...]:
        return () if self._shm is None else self._shm.place(addresses)

    def fuse_class(self, request: Request) -> str:
        if request.device != "cpu" or (request.placement and request.tensors[0].nbytes >= _IN_PLACE_BYTES):
            return ""
        return sum_class(request)

    def inline(self, kernels: str, request: Request, members: int) -> Request | None:
        return request if self._mailbox is not None and is_small(request, self._topology.size) else None

    def offer(self, work: Work, inline: Request) -> int:
        assert self._mailbox is not None
        return self._mailbox.offer(work, inline)

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], notes: tuple[int, ...]) -> int:
        entry, work = batch[0]
        members = entry.response.members
        if self._mailbox is not None:
            if notes:
                self._mailbox.run(entry, work, notes)
                return 0
            for _, one in batch:
                self._mailbox.drop(one)
        for _, one in batch:
            one.lend = self._results.take
        if len(members) == 1:
            for entry, work in batch:
                run_alone(entry, work)
            return 0
        if self._shm is not None and set(members) <= set(self._topology.mine):
            return self._run_inside(sequence, batch)
        library = kernels_named(work.kernels)
        if library.threads() == 1:
            self._execute(sequence, batch)
        else:
            with on_one_thread(library):
                self._execute(sequence, batch)
        return 0

    def _run_inside(self, sequence: int, batch: Sequence[tuple[Entry, Work]]) -> int:
        """Execute an entry whose members all are on this host; ``shm`` has its own numbers for them."""
        assert self._shm is not None
        for entry, _ in batch:
            if entry.cache is None:
                response, indices = entry.response, self._indices
                requests = tuple([replace(request, root=indices.get(request.root, 0)) for request in response.requests])
                members = tuple([indices[rank] for rank in response.members])
                local = replace(response, members=members, requests=requests)
                entry.cache = Entry(local, indices[self._topology.rank])
        return self._shm.run(sequence, [(entry.cache, work) for entry, work in batch], ())

    def _execute(self, sequence: int, batch: Sequence[tuple[Entry, Work]]) -> None:
        response = batch[0][0].response
        is_on_host = not response.requests or response.requests[0].device == "cpu"
        team = self._team(response.members, self._groups if is_on_host else self._device_groups)
        stage = team.stage
        self._last = stage.begin(sequence, self._last)
        if (routine := ROUTINES.get(response.kind)) is not None:
            routine(team, batch)
        # For a barrier, the log entry itself proves that all ranks have come.
        stage.end()

    def _team(self, members: tuple[int, ...], groups: Groups) -> Team:
        team = self._teams.get((members, groups))
        if team is None:
            rank, shm = self._topology.rank, self._shm
            hosts = self._topology.hosts_of(members)
            local = next(host for host in hosts if rank in host)
            memories = [self._memories[one] for one in local]
            indices = [self._indices[one] for one in local]
            stage = Stage(memories, local.index(rank), indices, None if shm is None else shm.flags)
            arenas = [] if shm is None else [shm.arenas[index].memory for index in indices]
            team = Team(rank, hosts, stage, self._scratch, groups, arenas)
            self._teams[members, groups] = team
        return team

    def settled(self, members: Sequence[int], fence: int) -> bool:
        return self._shm is None or self._shm.settled([self._indices[rank] for rank in members], fence)

    def skip(self, work: Work) -> None:
        if self._mailbox is not None:
            self._mailbox.drop(work)

    def rest(self) -> None:
        self._results.rest()
        if self._shm is not None:
            self._shm.rest()

    def close(self) -> None:
        self._groups.close()
        if self._device_groups is not self._groups:
            self._device_groups.close()
        if self._closes is not None:
            self._closes.close()
        self._teams.clear()
        self._memories.clear()
        if self._shm is not None:
            self._shm.close()


def _allreduce(team: Team, batch: _Batch) -> None:
    entry, work = batch[0]
    if entry.response.requests[0].op is ReduceOp.ADASUM:
        direct.adasum(team, entry, work)
        return
    places = in_place(entry, team.local, team.arenas) if len(batch) == 1 else ()
    for stream in streams_of(batch, team.hosts, team.here):
        allreduce(team, stream, () if stream.is_converted else places)


def _alone(routine: Callable[[Team, Entry, Work], None]) -> Callable[[Team, _Batch], None]:
    """Return a routine for entries that are never executed together with others."""
    return lambda team, batch: routine(team, *batch[0])


ROUTINES: dict[Kind, Callable[[Team, _Batch], None]] = {
    Kind.ALLREDUCE: _allreduce,
    Kind.ALLGATHER: _alone(assemble.allgather),
    Kind.BROADCAST: _alone(assemble.broadcast),
    Kind.ALLTOALL: _alone(direct.alltoall),
    Kind.REDUCESCATTER: _alone(reducescatter.reducescatter),
}
"""How to execute an entry of each kind over several hosts; a barrier needs no routine: all members have come."""
