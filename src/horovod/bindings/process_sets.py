"""Process sets: named subsets of the ranks, on which collectives can run."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from horovod import context
from horovod import world as worlds
from horovod.bindings import communicators
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.bindings.set_registry import KnownSet, SetRegistry
from horovod.core.requests import Kind
from horovod.engine.calls import Call
from horovod.errors import RequestError
from horovod.phrases import list_ranks
from horovod.world import World

__all__ = [
    "ProcessSet",
    "add_process_set",
    "at_init",
    "global_process_set",
    "id_or_none",
    "init",
    "is_provisional",
    "key_of",
    "not_registered",
    "process_set_ids_and_ranks",
    "remove_process_set",
    "renew",
    "shutdown",
    "was_asked",
    "when_asked",
]


class ProcessSet:
    """A subset of the ranks.

    Args:
        ranks_or_comm: global ranks; or a communicator of mpi4py, for ``init(process_sets=[...])``.

    Attributes:
        process_set_id: id of the registered set, else None.
        ranks: global ranks, ascending.
        mpi_comm: communicator from which it was made, else None; its ranks are known after ``init()``.

    Raises:
        ValueError: not a sequence of integers.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None
    #: Reason why the set is no longer registered.
    _why: str = ""

    def __init__(self, ranks_or_comm: Any) -> None:
        if communicators.is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            return
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"ProcessSet needs a sequence of ranks or a communicator of mpi4py. Received: {ranks_or_comm!r}"
            )
        ranks = list(ranks_or_comm)
        if any(isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) for rank in ranks):
            raise ValueError(f"ProcessSet needs integer ranks. Received: {ranks!r}")
        self.ranks = sorted(int(rank) for rank in ranks)

    def size(self) -> int | None:
        """Return the number of ranks, or None while the set is not registered."""
        was_asked()
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's index in the set, or None while the set is not registered.

        Raises:
            ValueError: this process is not a member.
        """
        was_asked()
        if self.process_set_id is None or self.ranks is None:
            return None
        rank = context.world().rank
        if rank not in self.ranks:
            raise not_a_member(rank, self.ranks)
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Return whether this process is a member, or None while the ranks are unknown."""
        if self.ranks is None:
            return None
        return context.world().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


def key_of(process_set: ProcessSet) -> tuple[int, ...]:
    """Return a key for what is remembered of a process set: its ranks, because a removed set's id is used again."""
    return tuple(process_set.ranks or ())


def not_a_member(rank: int, members: Sequence[int]) -> ValueError:
    """Return the error for a query of a non-member's index in a process set."""
    return ValueError(
        f"Process is not part of provided process set. Rank {rank} is not one of its members, {list_ranks(members)}; "
        "ask included() first"
    )


#: The set of all ranks; its ``ranks`` are known after init().
global_process_set = ProcessSet([])
global_process_set.process_set_id, global_process_set.ranks = 0, None
_registry = SetRegistry()
_adapter = NumpyAdapter()
_at_init: list[Callable[[], None]] = []
_when_asked: list[Callable[[], None]] = []


def at_init(function: Callable[[], None]) -> None:
    """Register a function that every framework's ``init()`` calls once rank and size are known."""
    _at_init.append(function)


def when_asked(function: Callable[[], None]) -> None:
    """Register a function that runs at each query of a rank or a number of ranks."""
    _when_asked.append(function)


def was_asked() -> None:
    """Run the ``when_asked`` functions: a rank or size is queried, and may be compiled into a program."""
    for function in _when_asked:
        function()


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job that a launcher started, or form a job of one rank; do nothing if already initialized.

    Args:
        comm: None for all ranks; a list of ranks, which then form a job of their own, numbered in list order; or an
            mpi4py communicator, whose processes form the job.
        process_sets: sets to register immediately, the same list on every rank. A set of all ranks is the global set;
            a set without ranks is ignored. "dynamic" is accepted without effect: sets can always be added later.

    Raises:
        InitError: the environment is contradictory, or the ranks did not find each other.
        ValueError: a process set is given twice, or names ranks that do not exist; this process is not in ``comm``,
            or is already initialized with another ``comm``.
        NotImplementedError: process sets made of communicators, in a job made of a list.

    Blocks until all ranks called, or HOROVOD_START_TIMEOUT seconds.
    """
    by_name = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    given: list[Any] = [] if process_sets is None or by_name else [process_sets]
    if isinstance(process_sets, Iterable) and not isinstance(process_sets, str):
        given = list(process_sets)
    if not all(isinstance(process_set, ProcessSet) for process_set in given):
        raise ValueError(f'process_sets must be a list of ProcessSet or "dynamic", received {process_sets!r}')
    by_comm = any(process_set.mpi_comm is not None for process_set in given)
    if by_comm and comm is not None and not communicators.is_communicator(comm):
        raise NotImplementedError("process sets made of MPI communicators need comm=None or a communicator")
    if by_comm or communicators.is_communicator(comm):
        communicators.check_start(comm)
    context.init(_place(comm))
    for function in _at_init:
        function()
    world = context.world()
    global_process_set.ranks = list(range(world.size))
    if by_comm:
        given = _of_communicators(given, comm)
    seen: list[list[int]] = []
    for process_set in given:
        ranks = process_set.ranks or []
        if ranks in seen:
            raise ValueError(f"process set {ranks} is given twice")
        seen.append(ranks)
    for process_set in given:
        ranks = process_set.ranks or []
        # In a one-rank job "all even ranks" is the global set. A second init() finds the sets of the first.
        known = None if is_provisional() else context.engine().sets.find(ranks)
        if known is None and ranks:
            add_process_set(process_set)
        elif ranks:
            assert known is not None
            _registry.note(known, process_set)


def _place(comm: Any) -> World | None:
    """Return this process's place in the job of ``comm``; None for the launcher's, or if already initialized."""
    if comm is None or communicators.is_communicator(comm):
        return None if comm is None or context.is_initialized() else communicators.world_of(comm)
    if not isinstance(comm, Iterable):
        raise ValueError(f"init(comm=...) takes a list of ranks or a communicator of mpi4py; received {comm!r}")
    try:
        ranks = [operator.index(rank) for rank in comm]
    except TypeError:
        raise ValueError(f"init(comm=...) takes a list of ranks, which are integers; received {comm!r}") from None
    world = worlds.part_of(worlds.detect(), ranks)
    if context.is_initialized() and (world.rank, world.job) != (context.world().rank, context.world().job):
        raise ValueError(f"init(comm={ranks}) in a job of other ranks: call shutdown() first")
    return world


def _of_communicators(given: list[ProcessSet], comm: Any) -> list[ProcessSet]:
    """Return the sets that any rank named: each rank may hold a different part of a split communicator."""
    for process_set in given:
        if process_set.mpi_comm is not None:
            process_set.ranks = communicators.ranks_in(process_set.mpi_comm, comm)
    own = {tuple(process_set.ranks or ()): process_set for process_set in given}
    wholes = communicators.all_sets([list(ranks) for ranks in own], comm)
    return [own.get(tuple(ranks)) or ProcessSet(ranks) for ranks in wholes]


def shutdown() -> None:
    """Leave the job; ``init()`` may follow. Ranks that still wait for this one get a ``PeerLostError``."""
    context.shutdown()
    _registry.clear()
    global_process_set.ranks = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; collective over all ranks, which must pass the same ranks.

    Args:
        process_set: the set, or a list of its global ranks.

    Returns:
        The registered set.

    Raises:
        ValueError: a set with these ranks exists already, or a rank does not exist.
        MismatchError: ranks named different sets.

    Blocks until all ranks called.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = tuple(process_set.ranks or ())
    if is_provisional():
        process_set.ranks = [*ranks]
        _registry.declare(process_set)
        return process_set
    engine = context.engine()
    outside = [rank for rank in ranks if not 0 <= rank < engine.size]
    if outside:
        raise ValueError(f"ranks {outside} do not exist in a job of {engine.size}")
    if process_set.mpi_comm is not None and process_set.ranks is None:
        raise NotImplementedError("a process set made of an MPI communicator is registered by init(process_sets=[...])")
    # An elastic training function adds its sets again each time it is called.
    if not _registry.takes_again(process_set):
        key = engine.run(Call(Kind.ADD_PROCESS_SET, ranks=ranks), _adapter).result
        _registry.note(key, process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; collective over all ranks.

    Args:
        process_set: a registered one; the object can be registered again later.

    Returns:
        False when the set is not registered, or is the global set; then nothing happens.

    Raises:
        ValueError: ``process_set`` is not a process set.

    Blocks until all ranks called.
    """
    if not (key := id_or_none(process_set)):
        return False
    if not is_provisional():
        context.engine().run(Call(Kind.REMOVE_PROCESS_SET, root=key), _adapter)
    _registry.remove(key)
    process_set.process_set_id = None
    return True


def id_or_none(process_set: ProcessSet) -> int | None:
    """Return the id of a process set; None if it is not registered.

    Raises:
        RequestError: ``process_set`` is not a process set.
    """
    try:
        return process_set.process_set_id
    except AttributeError:
        raise RequestError(
            "process_set must be a ProcessSet, such as hvd.add_process_set() returns; "
            f"received {process_set!r} of type {type(process_set).__name__}"
        ) from None


def process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of every registered set by its id."""
    return context.engine().sets.as_dict()


def not_registered(process_set: ProcessSet) -> str:
    """Return an error text: the reason why a process set cannot be used, and the remedy."""
    return process_set._why or (
        f"{process_set} is not registered; call add_process_set() or pass it to init(process_sets=) first"
    )


def is_provisional() -> bool:
    """Whether this is an elastic job before its first rendezvous, with unknown members."""
    return not _registry.have_met and context.is_elastic()


def renew() -> None:
    """Register all sets again with their surviving members, after a rendezvous of an elastic job.

    New ranks learn the sets from the others. Collective.

    Raises:
        PeerLostError: a rank died; call it again after the next rendezvous.
        ValueError: a set that was made before the first rendezvous names ranks that do not exist.
    """
    world = context.world()
    _registry.have_met = True
    for function in _at_init:
        function()
    global_process_set.ranks = list(range(world.size))
    _registry.renew(world.rank, context.membership().previous, _exchange, _register)


def _register(entry: KnownSet) -> None:
    if not entry.ranks:
        context.engine().sets.reserve(entry.key)
        return
    if entry.ranks[-1] >= context.world().size:
        raise ValueError(f"rank {entry.ranks[-1]} of a process set does not exist in a job of {context.world().size}")
    call = Call(Kind.ADD_PROCESS_SET, ranks=tuple(entry.ranks), root=entry.key)
    context.engine().run(call, _adapter)


def _exchange(own: Any) -> list[Any]:
    """Return the description that each rank sent of its sets. Collective."""
    text = np.frombuffer(json.dumps(own).encode() + b"\n", np.uint8)
    call = Call(Kind.ALLGATHER, "allgather.process_sets")
    (whole,) = context.engine().run(call, _adapter, (text,)).outputs
    return [json.loads(line) for line in whole.tobytes().splitlines()]
