"""A job on paper: a coordinator, and ranks that submit and replay the log as an engine would, without any process."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from horovod.core.coordinator import Coordinator, LogEntry
from horovod.core.generation import Generation, Member
from horovod.core.requests import NO_NOTE, Kind, Request, Response, TensorSpec

__all__ = ["Deadlock", "PaperHandle", "PaperJob", "Script", "play", "request", "shuffled"]

#: A rank's program: it submits, and yields a handle to wait for, or None to let others go on.
Script = Generator["PaperHandle | None", None, None]


class Deadlock(AssertionError):
    """Every rank waits and the log does not grow."""


def request(
    name: str = "", kind: Kind = Kind.ALLREDUCE, *, shape: tuple[int, ...] = (4,), dtype: str = "float32",
    **how: object,
) -> Request:  # fmt: skip
    """Return a request with one tensor; without any for the kinds that carry no data."""
    bare = kind in (Kind.BARRIER, Kind.JOIN, Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET)
    tensors = () if bare else (TensorSpec(dtype, shape),)
    if kind is Kind.ALLREDUCE:
        how.setdefault("fuse_class", f"{dtype} {how.get('op', '')}")
    return Request(name, kind, tensors=how.pop("tensors", tensors), **how)  # type: ignore[arg-type]


def shuffled(program: list[Request], rng: random.Random) -> list[Request]:
    """Any order of the named requests; unnamed ones keep theirs."""
    unnamed = iter([r for r in program if not r.name])
    mixed = program[:]
    rng.shuffle(mixed)
    return [r if r.name else next(unnamed) for r in mixed]


@dataclass(eq=False)
class PaperHandle:
    """One submission of one rank.

    Attributes:
        request: what was submitted.
        note: with which note.
        response: the answer, or None.
    """

    request: Request
    note: int
    response: Response | None = None


@dataclass
class PaperRank:
    """The state of one rank."""

    signatures: dict[Request, int] = field(default_factory=dict)
    entries: dict[int, Response] = field(default_factory=dict)
    named: dict[tuple[int, str], PaperHandle] = field(default_factory=dict)
    unnamed: dict[int, collections.deque[PaperHandle]] = field(default_factory=dict)
    executed: list[PaperHandle] = field(default_factory=list)

    def pending(self) -> list[PaperHandle]:
        return [*self.named.values(), *(handle for queue in self.unnamed.values() for handle in queue)]


class PaperJob:
    """See the module.

    Args:
        size: number of ranks.
        threshold: bytes that may be fused.
        capacity: responses that the coordinator remembers.
        signatures: requests that a rank remembers, those in flight aside.
    """

    def __init__(self, size: int, threshold: int = 128 << 20, capacity: int = 4096, signatures: int = 1024) -> None:
        self.coordinator = Coordinator(Generation([Member(0, "paper")] * size), threshold, capacity)
        self.ranks = [PaperRank() for _ in range(size)]
        self.log: list[LogEntry] = []
        self._threshold = threshold
        self._signatures = signatures

    def submit(self, rank: int, wanted: Request, note: int = NO_NOTE) -> PaperHandle:
        """Submit as a rank does: a declaration the first time, a number from then on."""
        me = self.ranks[rank]
        handle = PaperHandle(wanted, note)
        if wanted.name:
            assert (wanted.process_set, wanted.name) not in me.named, "the test submits a name twice"
            me.named[wanted.process_set, wanted.name] = handle
        else:
            me.unnamed.setdefault(wanted.process_set, collections.deque()).append(handle)
        self._submit(rank, self._signature(rank, wanted), note)
        return handle

    def agree(self, *wanted: Request) -> Response:
        """Let each rank submit its request, or all of them the only one that is given; return the answer to all."""
        handles = [self.submit(rank, wanted[rank % len(wanted)]) for rank in range(len(self.ranks))]
        self.settle()
        assert len({handle.response for handle in handles}) == 1
        return handles[0].response

    def _submit(self, rank: int, signature: int, note: int) -> None:
        self.coordinator.submit(rank, signature, note)

    def _declare(self, rank: int, signature: int, wanted: Request) -> None:
        self.coordinator.declare(rank, signature, wanted)

    def _signature(self, rank: int, wanted: Request) -> int:
        me = self.ranks[rank]
        if wanted in me.signatures:
            # The least recently used one is forgotten first.
            me.signatures[wanted] = signature = me.signatures.pop(wanted)
            return signature
        in_flight = {handle.request for handle in me.pending()}
        idle = [known for known in me.signatures if known not in in_flight]
        if len(me.signatures) >= self._signatures and idle:
            signature = me.signatures.pop(idle[0])
        else:
            signature = len(me.signatures)
        me.signatures[wanted] = signature
        self._declare(rank, signature, wanted)
        return signature

    def leave(self, rank: int, reason: str) -> None:
        """Let a rank take part no more."""
        self.coordinator.leave(rank, reason)

    def settle(self) -> list[LogEntry]:
        """Take the log and let every rank replay it; return the new part."""
        news = self.coordinator.take()
        self.log += news
        for entry in news:
            for rank in range(len(self.ranks)):
                self._replay(rank, entry)
        return news

    def _replay(self, rank: int, entry: LogEntry) -> None:
        me = self.ranks[rank]
        if entry.response is not None:
            me.entries[entry.ids[0]] = entry.response
        else:
            self._execute(rank, me, entry)

    def _execute(self, rank: int, me: PaperRank, run: LogEntry) -> None:
        responses = [me.entries[key] for key in run.ids]
        if len(responses) > 1:
            assert run.notes == ()
            assert sum(spec.nbytes for r in responses for spec in r.requests[0].tensors) <= self._threshold
            assert len({(r.kind, r.members, r.requests[0].op, r.requests[0].tensors[0].dtype) for r in responses}) == 1
        for response in responses:
            assert response.members == tuple(sorted(set(response.members)))
            if rank not in response.members:
                continue
            index = response.members.index(rank)
            if response.name:
                handle = me.named.pop((response.process_set, response.name))
            else:
                handle = me.unnamed[response.process_set].popleft()
            if not response.error and response.kind is not Kind.JOIN:
                meant = response.request_of(index)
                sent = handle.request
                fields = Request.__struct_fields__[:-1]
                assert [getattr(meant, f) for f in fields] == [getattr(sent, f) for f in fields]
            if run.notes:
                assert run.notes[index] == handle.note != NO_NOTE
            handle.response = response
            me.executed.append(handle)

    def assert_quiet(self) -> None:
        """Nothing is pending, on any rank or at the coordinator."""
        assert self.coordinator.waiting() == []
        assert [me.pending() for me in self.ranks] == [[] for _ in self.ranks]


def play(job: PaperJob, scripts: Sequence[Script], choose: Callable[[Sequence[int]], int]) -> None:
    """Run every rank's script to its end, in an order that ``choose`` decides.

    Raises:
        Deadlock: all ranks wait for ever.
    """
    waits: dict[int, PaperHandle | None] = dict.fromkeys(range(len(scripts)))
    while waits:
        ready = [rank for rank, handle in waits.items() if handle is None or handle.response is not None]
        if not ready:
            if not job.settle():
                waiting = {rank: handle.request for rank, handle in waits.items() if handle is not None}
                raise Deadlock(f"all ranks wait for ever: {waiting}; coordinator: {job.coordinator.waiting()}")
            continue
        rank = choose(ready)
        try:
            waits[rank] = next(scripts[rank])
        except StopIteration:
            del waits[rank]
        if choose((0, 1)):
            job.settle()
    job.settle()
