"""The loop around a training function: after a loss or a change the ranks meet anew, and it is called again."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from horovod import context
from horovod.bindings import process_sets
from horovod.bindings.collectives import Collectives
from horovod.bindings.elastic import checkpoint, generators, leave
from horovod.bindings.elastic.notifications import notification_manager
from horovod.bindings.elastic.state import State
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.errors import (
    DeadlockError,
    DismissedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InitError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RequestError,
)
from horovod.logs import logger

__all__ = ["recover", "run", "run_fn"]

R = TypeVar("R")
_Cause = HorovodInternalError | HostsUpdatedInterrupt

_comm = Collectives(NumpyAdapter())

#: Mistakes of the script, and the end of the job: another try would fail as well.
_FINAL = (DeadlockError, InitError, MismatchError, NotInitializedError, RequestError)


class _Job(Protocol):
    """How the members of a job meet."""

    def enter(self, state: State) -> None:
        """Meet for the first time."""

    def takes(self, error: HorovodInternalError) -> bool:
        """Whether to meet anew after an error."""

    def renew(self, state: State) -> None:
        """Meet anew."""

    def sync(self, state: State) -> None:
        """Bring the states together."""

    def leave(self, state: State) -> None:
        """The training function has returned."""


def run_fn(func: Callable[..., R], reset: Callable[[], Any]) -> Callable[..., R]:
    """Return a training function that goes on after errors of collectives, and changes of the hosts.

    Args:
        func: the training function; takes a state first.
        reset: forms the job anew; not called in an elastic job, where the job service does that.
    """
    return _around(func, lambda: _ThisJob() if context.is_elastic() else _GivenReset(reset))


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Make a training function go on when ranks are lost or join; in jobs that are not elastic, a loss ends it.

    The function takes a state first, and goes on where the state says. When a rank is lost, the others set the state
    back to its last commit, or to the last step of ``hvd.elastic.step``; they renew the membership, call ``reset()`` of
    the state and the reset callbacks, bring all states together, and call the function again. Processes that are new
    begin with the state of the others.

    Args:
        func: the training function.

    Returns:
        The function, with the same arguments and result. It raises what ``func`` raises; errors of the script itself
        are not repeated. A process that is no member any more ends in it, with exit code 0.
    """
    return _around(func, _ThisJob)


def _around(func: Callable[..., R], make_job: Callable[[], _Job]) -> Callable[..., R]:
    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            with leave.leaving_allowed():
                return _repeat(make_job(), func, state, args, kwargs)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _repeat(job: _Job, func: Callable[..., R], state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> R:
    job.enter(state)
    cause: _Cause | None = None
    while True:
        try:
            if cause is None:
                job.sync(state)
            else:
                _go_on(job, state, cause)
            result = func(state, *args, **kwargs)
            job.leave(state)
            return result
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            cause = error
            _prepare(job, state, cause)


def _prepare(job: _Job, state: State, cause: _Cause) -> None:
    """Let the state be what the next members go on with."""
    if isinstance(cause, HostsUpdatedInterrupt):
        state._sync_present = True
        return
    if not job.takes(cause):
        raise cause
    logger.debug("elastic: %s", cause)
    if not state._keeps_steps:
        state._go_back()
        state._sync_present = False


def _go_on(job: _Job, state: State, cause: _Cause) -> None:
    """Meet anew, and bring the states together."""
    # Free what the failed calls hold, such as the tensors of their step.
    traceback.clear_frames(cause.__traceback__)
    if isinstance(cause, HostsUpdatedInterrupt):
        state.before_change()
    job.renew(state)
    state.on_reset()
    # In an elastic job a new rank may have come, which waits for all.
    if context.is_elastic() or not (isinstance(cause, HostsUpdatedInterrupt) and cause.skip_sync):
        job.sync(state)


def recover(state: State, cause: _Cause) -> None:
    """Do where a step has failed, or before one, what ``run`` does around its function.

    Args:
        state: as it was before the step.
        cause: what ended it, or a change that is due.

    Raises:
        HorovodInternalError: there is no way to go on, or no step was done that counts: ``run`` has to decide.

    Blocks until the membership is renewed and all states are the same.
    """
    job = _ThisJob()
    job.find_folder()
    while True:
        if isinstance(cause, HorovodInternalError) and not state._keeps_steps:
            raise cause
        _prepare(job, state, cause)
        try:
            _go_on(job, state, cause)
            return
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            cause = error


class _GivenReset:
    """A job that a function forms anew, as old import paths have it.

    Args:
        reset: the function.
    """

    def __init__(self, reset: Callable[[], Any]) -> None:
        self._reset = reset

    def enter(self, state: State) -> None:
        """Do nothing."""

    def takes(self, error: HorovodInternalError) -> bool:
        """Take all errors."""
        return True

    def renew(self, state: State) -> None:
        """Call the function."""
        self._reset()

    def sync(self, state: State) -> None:
        """Bring the states together."""
        state.sync()

    def leave(self, state: State) -> None:
        """Do nothing."""


class _ThisJob:
    """The job of this process."""

    def __init__(self) -> None:
        self._is_elastic = context.is_elastic()
        self._folder = ""
        self._has_digest = False

    def enter(self, state: State) -> None:
        """Take the state of an earlier job from a file, and meet for the first time."""
        if not self._is_elastic:
            return
        self.find_folder()
        if self._folder and (found := checkpoint.newest(self._folder)):
            path, progress = found
            values = checkpoint.read(path)
            state.load_checkpoint(values)
            state.save()
            state.progress = progress
            state._note_saved()
            logger.warning("the state of step %d is taken from %s", progress, path)
        self.renew(state)

    def find_folder(self) -> None:
        """Find out where checkpoints are, if there are any."""
        self._folder = context.config().checkpoint_dir

    def takes(self, error: HorovodInternalError) -> bool:
        """Take the loss of a rank, in an elastic job."""
        return self._is_elastic and not isinstance(error, _FINAL)

    def renew(self, state: State) -> None:
        """Meet anew.

        Raises:
            InitError: the job is over.
            SystemExit: this process is no member any more.
        """
        digest = state.digest()
        self._has_digest = bool(digest)
        while True:
            try:
                context.renew(-1 if state._lacks_values else state.progress, digest)
                process_sets.renew()
                state._change_is_due = False
                return
            except DismissedError as error:
                logger.info("this process leaves the job: %s", error)
                leave.run_functions()
                sys.exit(0)
            except InitError as error:
                self._write(state)
                if leave.was_asked():  # as all others were
                    logger.info("this process leaves the job: %s", error)
                    leave.run_functions()
                    sys.exit(0)
                raise
            except PeerLostError:  # again
                continue

    def _write(self, state: State) -> None:
        if self._folder and state.progress:
            try:
                path = checkpoint.write(self._folder, state.progress, state.checkpoint())
            except Exception:
                logger.exception("the state cannot be written to %s", self._folder)
            else:
                logger.warning("the state of step %d is in %s; the next start goes on with it", state.progress, path)

    def sync(self, state: State) -> None:
        """Bring the states together, and copy only what is behind."""
        if not self._is_elastic:
            state.sync()
            return
        rank, view = context.world().rank, context.membership()
        members = _exchange(state, is_new=view.previous[rank] < 0)
        # If all others are lost before it has their state, it must not begin anew as if it were the job's.
        state._lacks_values = rank in view.behind and members[rank].is_new and members[0].progress > 0
        state._all_equal = not view.behind and self._has_digest
        state._sync_present = state._sync_present or members[0].keeps_steps
        try:
            state.sync()
        except HorovodInternalError:
            if rank in view.behind:
                state._keeps_steps = False  # a part of the values may be those of rank 0
            raise
        finally:
            state._all_equal = state._sync_present = False
        if view.behind:
            _follow(state, rank, members, rank in view.behind)
        state._lacks_values = False

    def leave(self, state: State) -> None:
        """Wait until all are done, so that the state is there if one more is lost; remove its file."""
        if self._is_elastic:
            _comm.allreduce(np.zeros(1), name="elastic.end")
        if self._folder:
            checkpoint.remove(self._folder, state.progress)


class _Member(NamedTuple):
    """A rank, as far as the others must know.

    Attributes:
        is_new: whether it was no member of the generation before.
        progress: boundaries that it has completed.
        keeps_steps: whether it is further than its last commit.
        randomness: fingerprint of its random generators, now and at the start of its last step.
    """

    is_new: bool
    progress: int
    keeps_steps: bool
    randomness: tuple[str, str]


def _exchange(state: State, is_new: bool) -> list[_Member]:
    """Return all ranks. Collective."""
    now = generators.fingerprint(generators.read(state._generators))
    before = generators.fingerprint(state._captured_generators or ())
    own = _Member(is_new, state.progress, state._keeps_steps, (now, before))
    return [_Member(*found) for found in allgather_object(tuple(own), "elastic.members")]


def _follow(state: State, rank: int, members: Sequence[_Member], is_behind: bool) -> None:
    """Take over progress and random generators of rank 0 where this rank is behind. Collective.

    Generators that were alike on all ranks stay so. Where each rank had its own, new ranks get others.
    """
    first, old = members[0], [member for member in members if not member.is_new]
    # A rank that is one step behind has begun that step as rank 0 has.
    alike = all(each.randomness[0] == first.randomness[each.progress < first.progress] for each in old)
    if old and alike:
        states = broadcast_object(generators.read(state._generators) if rank == 0 else None, 0, "elastic.generators")
        if is_behind:
            generators.write(state._generators, states)
    elif old and members[rank].is_new:
        seed = generators.derived_seed([first.randomness[0]], rank)
        for generator in state._generators:
            generator.seed(seed)
    if is_behind:
        state.progress, state._keeps_steps = first.progress, first.keeps_steps
        if not first.keeps_steps:
            state.save()
            state._note_saved()
