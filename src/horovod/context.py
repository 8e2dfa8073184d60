"""The one engine of this process: init, shutdown, and the process's place in the job."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from horovod import config as configuration
from horovod import logs, tracebacks
from horovod import world as worlds
from horovod.config import Config
from horovod.core.generation import MembershipView
from horovod.engine import callsite
from horovod.engine.engine import Engine
from horovod.engine.signals import obey_sigterm
from horovod.engine.stats import Stats
from horovod.errors import HorovodInternalError, InitError, NotInitializedError, PeerLostError
from horovod.links import renewal
from horovod.observe.ending import Ending, ErrorHooks
from horovod.observe.observer import JobObserver
from horovod.rendezvous import process_tree
from horovod.rendezvous.endings import note_begin
from horovod.world import World

if TYPE_CHECKING:
    from horovod.rendezvous.membership_client import MembershipClient

__all__ = [
    "config", "count_join", "end_training", "engine", "init", "init_count", "is_elastic", "is_initialized",
    "join_count", "leave_job", "membership", "note_exception", "observer", "renew", "shutdown", "wants_change", "world",
]  # fmt: skip

#: Seconds for which a rank that failed because of another waits for its end, so that the launcher sees the cause.
_CULPRIT_FIRST_S = 1.0


class _Context:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.engine: Engine | None = None
        self.observer: JobObserver | None = None
        self.world: World | None = None
        self.config: Config | None = None
        self.meetings: collections.Counter[str] = collections.Counter()
        self.init_count = 0
        self.join_count = 0
        self.client: MembershipClient | None = None  # of an elastic job
        self.base: World | None = None  # host, job and key, for its generations
        self.membership: MembershipView | None = None
        self.past: Stats | None = None  # statistics of earlier generations
        self.is_child = False
        self.registered = False
        self.ending = Ending()
        self.hooks = ErrorHooks(note_exception)
        self.is_beginning = False
        self.has_failed_to_begin = False
        self.left_at = ""  # place of the last call of shutdown(), such as "at train.py:7"


def init(world: World | None = None) -> None:
    """Join the job that a launcher started, or make a world of one; does nothing when already done.

    In an elastic job it only connects this process with the job service: ``renew`` joins the other ranks, and until
    then rank and size are provisional.

    Args:
        world: this process's place in the job; from the launcher when omitted.

    Raises:
        InitError: the environment is contradictory, or the ranks did not find each other.
        PeerLostError: another rank died inside init().

    Blocks until all ranks called, or HOROVOD_START_TIMEOUT seconds.
    """
    with _context.lock:
        if _context.engine is not None or _context.client is not None:
            if _context.is_child:
                assert _context.world is not None
                raise InitError(f"init() in a child of a rank: {process_tree.is_no_rank(_context.world)}")
            return
        if _context.is_beginning:
            raise InitError("init() inside of init(): a signal handler or finalizer called it; the outer call goes on")
        _context.is_beginning = True
        try:
            _begin(world)
        except BaseException:
            _leave()  # stop all parts that had begun when an interrupt came
            raise
        finally:
            _context.is_beginning = False


def _begin(world: World | None) -> None:
    _context.hooks.install()
    obey_sigterm()
    # Forget how an earlier job ended.
    _context.ending = Ending()
    _context.has_failed_to_begin = True  # until the beginning has succeeded
    note_begin()
    if not _context.registered:
        _context.registered = True
        atexit.register(_at_exit)
    try:
        settings = configuration.load()
    except ValueError as error:
        raise InitError(str(error)) from None
    is_part = world is not None
    world = world or worlds.detect()
    if settings.elastic:
        _attend(world, settings, is_part)
        return
    if world.is_spread or not (world.meeting.is_place_known and (world.key or world.size == 1)):
        # ZeroMQ takes a while to load, and one host does not need it.
        from horovod.rendezvous import hosts

        world = hosts.prepare(world, settings.start_timeout_s)
    if world.size > 1 and (parent := process_tree.rank_above(world.job)):
        raise InitError(f"init() in a child of a rank: {process_tree.is_no_rank(world, parent)}")
    logs.configure(settings, world.rank, configuration.doubtful_variables())
    watching = JobObserver(settings, world.job)
    number = _context.meetings[world.job] + 1
    made = Engine(renewal.assemble(world, settings, number, watching), settings, watching)
    # Count only successful meetings: ranks that failed, or never came, must still agree with the others afterwards.
    _context.meetings[world.job] = number
    _context.membership = MembershipView(1, (), (-1,) * world.size)
    _run(made, world, settings, watching)


def _attend(world: World, settings: Config, is_part: bool) -> None:
    """Connect to the service of an elastic job."""
    if is_part:
        raise InitError("init(comm=...) is not for elastic jobs, whose members change; use process sets")
    client, world = renewal.connect(world, settings, _lose)
    logs.configure(settings, world.rank, configuration.doubtful_variables())
    _context.client, _context.base, _context.world, _context.config = client, world, world, settings
    _context.is_child = False
    _context.has_failed_to_begin = False


def _run(made: Engine, world: World, settings: Config, watching: JobObserver) -> None:
    before, _context.engine, _context.observer = _context.observer if settings.elastic else None, made, watching
    made.past = _context.past
    _context.world, _context.config = made.link.generation.placed(world), settings
    _context.is_child = False
    _context.init_count += 1
    _context.join_count = 0
    made.start()
    try:
        watching.record(before, made.link.generation.number)
    except InitError:
        shutdown()
        raise
    _context.has_failed_to_begin = False


def _lose(rank: int, how: str) -> None:
    """Abort, as a rank has ended, or (-1) the job's service cannot be reached; the client's thread calls this."""
    current = _context.engine
    if current is not None and rank != current.rank:
        what = f"{current.link.generation.describe(rank)} {how}" if rank >= 0 else how
        current.abort(PeerLostError(what, rank=rank) if rank >= 0 else HorovodInternalError(what))


def shutdown(how: str = "") -> None:
    """Leave the job; ``init()`` may follow. Does nothing when not initialized.

    Ranks that still wait for this one get a PeerLostError with the reason ``how``; by default the line of this call.
    """
    _leave(how)
    _close_client()
    _context.left_at = callsite.here()


def _close_client(how: str = "") -> None:
    client, _context.client, _context.past, _context.observer = _context.client, None, None, None
    if client is not None and not _context.is_child:
        client.close(how)


def _leave(how: str = "") -> None:
    # Takes no lock, so that a signal handler may call it; after an interrupt at any point it may be called again.
    engine = _context.engine
    if engine is None:
        return
    if _context.is_child:
        _context.engine = None
        return
    engine.stop(_context.ending.reason(engine.link.generation.describe(engine.rank), engine.ring, how))
    if _context.engine is engine:
        _context.engine = None


def is_initialized() -> bool:
    """Return whether ``init()`` was called, and ``shutdown()`` not."""
    return (_context.engine is not None or _context.client is not None) and not _context.is_child


def engine() -> Engine:
    """Return this process's engine.

    Raises:
        NotInitializedError: there is none.
    """
    current = _context.engine
    if current is None or _context.is_child:
        raise _not_initialized()
    return current


def observer() -> JobObserver:
    """Return the observer of this process's engine.

    Raises:
        NotInitializedError: there is none.
    """
    engine()
    assert _context.observer is not None
    return _context.observer


def world() -> World:
    """Return this process's place in the job; also in forked children of a rank, such as data loader workers.

    Raises:
        NotInitializedError: ``init()`` was not called, or ``shutdown()`` was.
    """
    if (_context.engine is None and _context.client is None) or _context.world is None:
        raise _not_initialized()
    return _context.world


def config() -> Config:
    """Return the settings in force.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    if (_context.engine is None and _context.client is None) or _context.config is None:
        raise _not_initialized()
    return _context.config


def is_elastic() -> bool:
    """Return whether this process was started as a part of an elastic job, so that ``renew`` works."""
    return configuration.is_elastic()


def renew(progress: int = 0, digest: str = "") -> None:
    """Leave the present generation of an elastic job, if this process is in one, and join the next one.

    Another thread that waits for a collective gets an error. Afterwards rank, size, engine and ``membership()`` are
    those of the new generation. After an error, such as an interrupt, it may be called again.

    Args:
        progress: number of steps that this process has completed; -1 if it is new and does not have the others' state.
        digest: hash of its state; equal digests mean equal states.

    Raises:
        DismissedError: this process is not a member any more, since its host was withdrawn or it has called
            ``leave_job``; no failure, it should end with exit code 0.
        InitError: the job was not started elastically, or is over; the message says why.

    Blocks until all members of a generation have met. The job service keeps the time (HOROVOD_ELASTIC_TIMEOUT); a
    spare waits for as long as the job runs.
    """
    if not is_elastic():
        raise InitError(
            "this job was not started elastically, so that its membership cannot be renewed; start it with "
            "horovodrun --min-np, or --host-discovery-script"
        )
    with _context.lock:
        client, base, settings = _context.client, _context.base, _context.config
        if client is None or base is None or settings is None or _context.is_child:
            raise _not_initialized()
        _context.past = _context.engine.stats() if _context.engine is not None else _context.past
        _leave()
        watching = JobObserver(settings, base.job)
        world, made, place = renewal.renew(client, base, settings, watching, progress, digest)
        _context.membership = MembershipView(place.generation, tuple(place.behind), tuple(place.previous))
        _run(made, world, settings, watching)


def membership() -> MembershipView:
    """Return the present generation; in a job that is not elastic, the only one.

    Raises:
        NotInitializedError: there is no engine.
    """
    engine()
    assert _context.membership is not None
    return _context.membership


def wants_change() -> bool:
    """Return whether the job service wants another generation, as far as this rank knows; never blocks.

    Ranks may see it at different times: agree on rank 0's view before acting on it.
    """
    client = _context.client
    return client is not None and not _context.is_child and client.wants_change


def end_training(progress: int) -> None:
    """Tell the job service that all members have ended their training, after so many steps; never blocks.

    Until this process calls ``renew`` again, a process that is lost is not replaced.
    """
    client = _context.client
    if client is not None and not _context.is_child:
        client.done(progress)


def leave_job() -> None:
    """Ask to leave the job at the next change, for example after SIGTERM; never blocks.

    The job service then wants another generation. ``renew`` raises DismissedError here, while the others go on.
    Does nothing in a job that is not elastic.
    """
    client = _context.client
    if client is not None and not _context.is_child:
        client.leave()


def init_count() -> int:
    """Return how many times ``init()`` has built an engine; objects made for an older one are stale."""
    return _context.init_count


def count_join() -> None:
    """Count that this process has joined, in any framework."""
    _context.join_count += 1


def join_count() -> int:
    """Return how many times this process has joined since ``init()``; equal on all ranks while none is in ``join``."""
    return _context.join_count


def _not_initialized() -> NotInitializedError:
    said = "Horovod has not been initialized"
    if _context.client is not None and not _context.is_child:
        left, hint = "yet", "call collectives in a function that is decorated with @hvd.elastic.run"
        if _context.left_at:
            left, hint = f"since hvd.shutdown() {_context.left_at}", "only hvd.elastic.run joins them"
        who = "this process has not joined the other ranks of its elastic job"
        return NotInitializedError(f"{who} {left}, {callsite.here()}: {hint}")
    if _context.world is not None and _context.is_child:
        return NotInitializedError(f"{said}: {process_tree.is_no_rank(_context.world)}")
    with contextlib.suppress(InitError):
        world = worlds.detect()
        if world.size > 1 and (parent := process_tree.rank_above(world.job)):
            return NotInitializedError(f"{said}: {process_tree.is_no_rank(world, parent)}")
    return NotInitializedError(f"{said}; use hvd.init().")


def _at_exit() -> None:
    current = _context.engine
    if current is not None and not _context.is_child and current.peers is not None and current.culprit >= 0:
        current.peers.wait_for_end(current.culprit, _CULPRIT_FIRST_S)
    _context.ending.note_last()
    has_failed = _context.has_failed_to_begin or (current is not None and current.failure is not None)
    _leave("it ended its script")
    _close_client(_context.ending.exception)
    if has_failed and "mpi4py.MPI" in sys.modules:
        from horovod.rendezvous import mpi

        mpi.limit_end()


def note_exception(error: BaseException, trace: TracebackType | None) -> None:
    """Remember the exception that ends this script, so that the other ranks can be told."""
    _context.ending.note(error, trace)
    tracebacks.shorten(error.with_traceback(trace))
    is_running = _context.engine is not None and not _context.is_child
    if _context.observer is not None and is_running and isinstance(error, Exception):
        _context.observer.script_failed("".join(traceback.format_exception(error)))


def _after_fork(*_: Any) -> None:
    # A thread of the parent may hold the lock; that thread does not exist here.
    _context.lock = threading.RLock()
    # Every operation checks this; os.getpid() would be a system call.
    _context.is_child = _context.engine is not None or _context.client is not None
    _context.is_beginning = False


_context = _Context()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

# Also for errors before init(), such as a call without it.
_context.hooks.install()
