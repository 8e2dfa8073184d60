"""The loop around a training function: after a lost rank or a membership change, rendezvous and call it again."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from horovod import context
from horovod.bindings import process_sets
from horovod.bindings.elastic import checkpoint, generators, leave
from horovod.bindings.elastic.notifications import notification_manager
from horovod.bindings.elastic.state import State
from horovod.bindings.misuse import check_decorated, type_name, wrong_argument
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.bindings.runtime import comm
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

#: The key of the job, and how many training functions this process has begun in it.
_trainings = b"", 0

#: Errors of the script, and the end of the job: a retry would fail, too.
_FINAL = (DeadlockError, InitError, MismatchError, NotInitializedError, RequestError)


def run_fn(func: Callable[..., R], reset: Callable[[], Any]) -> Callable[..., R]:
    """Return a training function that resumes after errors of collectives and changes of the hosts.

    Args:
        func: the training function; its first argument is a state.
        reset: re-forms the job; not called in an elastic job, where the job service does this.
    """
    return _around(func, lambda: _Job(None if context.is_elastic() else reset))


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Make a training function resume when ranks are lost or join; in non-elastic jobs a lost rank ends it.

    The function's first argument is a state; it continues from that state. When a rank is lost, the others restore the
    last commit, or the last step of ``hvd.elastic.step``. They renew the membership, call ``reset()`` of the state and
    the reset callbacks, synchronize all states, and call the function again. New processes begin with the state of the
    others.

    Args:
        func: the training function.

    Returns:
        The function, with the same arguments and result. It passes on exceptions of ``func``; errors of the script are
        not retried. A process that is no longer a member exits inside the function, with exit code 0.
    """
    return _around(func, _Job)


def _around(func: Callable[..., R], make_job: Callable[[], _Job]) -> Callable[..., R]:
    check_decorated(func, "hvd.elastic.run takes the training function")

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, State):
            raise wrong_argument(f"a function of hvd.elastic.run needs a state first. Received: {type_name(state)}")
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            with leave.leaving_allowed():
                return _repeat(make_job(), func, state, args, kwargs)
        except SystemExit as error:
            if error.code:  # some launchers do not report it
                context.note_exception(error, error.__traceback__)
            raise
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
    """Prepare the state from which the next members continue."""
    if isinstance(cause, HostsUpdatedInterrupt):
        state._sync_present = True
        return
    if not job.takes(cause, state):
        raise cause
    logger.debug("elastic: %s", cause)
    if not state._keeps_steps:
        state._go_back()
        state._sync_present = False


def _go_on(job: _Job, state: State, cause: _Cause) -> None:
    """Rendezvous again, and synchronize the states."""
    # Free the objects that the failed calls hold, such as the tensors of their step.
    traceback.clear_frames(cause.__traceback__)
    state._drop_unconfirmed()  # before values are compared and sent
    if isinstance(cause, HostsUpdatedInterrupt):
        state.before_change()
    job.renew(state)
    state.on_reset()
    # In an elastic job a new rank may have joined; it waits for the sync of all ranks.
    if context.is_elastic() or not (isinstance(cause, HostsUpdatedInterrupt) and cause.skip_sync):
        job.sync(state)


def recover(state: State, cause: _Cause) -> None:
    """Recover at a failed step, or before a step, as ``run`` does around its function.

    Args:
        state: the state as it was before the step.
        cause: the error that ended the step, or a pending membership change.

    Raises:
        HorovodInternalError: recovery is impossible, or no step to keep was completed; ``run`` handles it.

    Blocks until the membership is renewed and all states are equal.
    """
    job = _Job()
    job.find_folder(_trainings[1])
    while True:
        if isinstance(cause, HorovodInternalError) and not state._keeps_steps:
            raise cause
        _prepare(job, state, cause)
        try:
            _go_on(job, state, cause)
            return
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            cause = error


class _Job:
    """The job of this process.

    Args:
        reset: re-forms the job after any error; None leaves that to the job service of an elastic job.
    """

    def __init__(self, reset: Callable[[], Any] | None = None) -> None:
        self._reset = reset
        self._is_elastic = context.is_elastic()
        self._folder = ""
        self._loaded = 0  # progress in the checkpoint from which this process has begun
        self._has_digest = False

    def enter(self, state: State) -> None:
        """Load the state of an earlier job from a checkpoint, and do the first rendezvous.

        Raises:
            InitError: no checkpoint could be written, or the one that is there cannot be read.
            ValueError: the checkpoint is damaged, or does not fit the state.
        """
        global _trainings
        if not self._is_elastic:
            return
        key = context.world().key
        number = 1 + (_trainings[1] if _trainings[0] == key else 0)
        self.find_folder(number)
        found = None
        if self._folder:
            try:
                checkpoint.check(self._folder)
                if found := checkpoint.newest(self._folder):
                    values = checkpoint.read(found[0])
            except OSError as error:
                raise InitError(
                    "no state can be written to HOROVOD_CHECKPOINT_DIR (--checkpoint-dir), or read from it: "
                    f"{error}; name another folder, or see to it that this one can be used"
                ) from None
        if found:
            path, self._loaded = found
            try:
                state.load_checkpoint(values)
            except Exception as error:
                raise ValueError(
                    f"{path} does not fit this state ({type(error).__name__}: {error}). Start the script that wrote "
                    "it, or remove it to begin anew"
                ) from error
            state.save()
            state.progress = self._loaded
            state._note_saved()
            logger.warning("the state of step %d is taken from %s", state.progress, path)
        self.renew(state)
        _trainings = key, number

    def find_folder(self, number: int) -> None:
        """Look up the folder of the checkpoints; empty if none is configured. The next start must not take the state of
        a later training, which has a folder inside, for that of the first one.
        """
        self._folder = context.config().checkpoint_dir
        if self._folder and number > 1:
            self._folder = f"{self._folder}/training-{number}"

    def takes(self, error: HorovodInternalError, state: State) -> bool:
        """Return whether to rendezvous again: after a lost rank in an elastic job, or with a reset function; but not
        after the fourth failure of a step in turn without a lost rank, which would come again.
        """
        here = [progress for progress in (*state._failed_at, state.progress) if progress == state.progress]
        state._failed_at = [] if isinstance(error, PeerLostError) else here
        goes_on = self._is_elastic and not isinstance(error, _FINAL) and len(state._failed_at) < 4
        return self._reset is not None or goes_on

    def renew(self, state: State) -> None:
        """Rendezvous again.

        Raises:
            InitError: the job is over.
            SystemExit: this process is no longer a member.
        """
        if self._reset is not None:
            self._reset()
            return
        digest = state.digest()
        self._has_digest = bool(digest)
        while True:
            try:
                context.renew(-1 if state._lacks_values else state.progress, digest)
                process_sets.renew()
                state._change_is_due, state._asked = False, None
                return
            except InitError as error:
                if not isinstance(error, DismissedError):
                    self._write(state)
                    if not leave.was_asked():  # as all others were
                        raise
                logger.info("this process leaves the job: %s", error)
                break
            except PeerLostError:  # again
                continue
        leave.run_functions()  # their errors have no other cause
        sys.exit(0)

    def _write(self, state: State) -> None:
        # A process that was never a member has no more than the checkpoint, which others may have removed at the end.
        if self._folder and state.progress > self._loaded:
            try:
                path = checkpoint.write(self._folder, state.progress, state.checkpoint())
            except OSError as error:
                logger.error("the state of step %d cannot be written to %s: %s", state.progress, self._folder, error)
            except Exception:
                logger.exception("the state cannot be written to %s", self._folder)
            else:
                logger.warning("the state of step %d is in %s; the next start goes on with it", state.progress, path)

    def sync(self, state: State) -> None:
        """Synchronize the states; send values only to ranks that are behind."""
        if not self._is_elastic:
            state.sync()
            return
        rank, view = context.world().rank, context.membership()
        is_new = view.previous[rank] < 0
        # If all other ranks die before this new rank has their state, its fresh state must not become the job's state.
        state._lacks_values = is_new and rank in view.behind and max(view.previous) >= 0
        members = _exchange(state, is_new)
        state._lacks_values = state._lacks_values and members[0].progress > 0
        randomness = _common_generators(state, rank, members) if view.behind else None
        # A digest leaves out what training does not change, or changes on each rank in its own way: a new rank has
        # its own values of these.
        state._all_equal = not view.behind and self._has_digest and min(view.previous) >= 0
        state._sync_present = state._sync_present or members[0].keeps_steps
        if rank in view.behind and state._keeps_steps:
            # A sync that fails may leave some of rank 0's values here; then this rank returns to its own last step.
            state.save()
            state._note_saved()
        try:
            state.sync()
        finally:
            state._all_equal = state._sync_present = False
        if rank in view.behind:
            # Nothing may fail from here on: all other ranks may have been lost, and this one has the only state.
            state.save()
            state.progress = members[0].progress
        if view.behind:
            _follow(state, rank, members, rank in view.behind, randomness)
        state._lacks_values = False

    def leave(self, state: State) -> None:
        """Wait until all ranks are done, so that no state is lost if one more rank dies; remove the checkpoint."""
        if self._is_elastic:
            comm.allreduce(np.zeros(1), name="elastic.end")
            context.end_training(state.progress)
        if self._folder:
            try:
                checkpoint.remove(self._folder, state.progress)
            except OSError as error:  # the script has still to save what it has trained
                logger.error("%s; remove this state of an earlier job, or the next start goes on with it", error)


class _Member(NamedTuple):
    """Properties of a rank that the other ranks must know.

    Attributes:
        is_new: whether the rank was no member of the previous generation.
        progress: number of boundaries that it has completed.
        keeps_steps: whether it has completed steps after its last commit.
        training: the number of the training function in its script.
        randomness: fingerprints of its random generators: now, and at the start of its last step.
    """

    is_new: bool
    progress: int
    keeps_steps: bool
    training: int
    randomness: tuple[str, str]


def _exchange(state: State, is_new: bool) -> list[_Member]:
    """Return the properties of all ranks. Collective.

    Raises:
        RequestError: a rank is in another training function of the script than the others.
    """
    now = generators.fingerprint(generators.read(state._generators))
    before = generators.fingerprint(state._captured_generators or ())
    own = _Member(is_new, state.progress, state._keeps_steps, _trainings[1], (now, before))
    members = [_Member(*found) for found in allgather_object(tuple(own), "elastic.members")]
    if len(numbers := {member.training for member in members}) > 1:
        raise RequestError(
            f"a rank that joins begins its script anew, so it is in training {min(numbers)} of hvd.elastic.run, and "
            f"others are in training {max(numbers)}. Give each training a job of its own"
        )
    return members


def _common_generators(state: State, rank: int, members: Sequence[_Member]) -> list[Any] | None:
    """Return the states of rank 0's random generators, if all old ranks had the same ones; else None. Collective."""
    first, old = members[0], [member for member in members if not member.is_new]
    # A rank that is one step behind began that step with the same generators as rank 0.
    alike = all(each.randomness[0] == first.randomness[each.progress < first.progress] for each in old)
    if not (old and alike):
        return None
    states: list[Any] = broadcast_object(
        generators.read(state._generators) if rank == 0 else None, 0, "elastic.generators"
    )
    return states


def _follow(
    state: State, rank: int, members: Sequence[_Member], is_behind: bool, randomness: Sequence[Any] | None
) -> None:
    """Let this rank draw the random numbers that all others draw (``randomness``), or a new one numbers of its own.

    If it was behind, note its values as saved, with these generators.
    """
    if randomness is not None and is_behind:
        generators.write(state._generators, randomness)
    elif randomness is None and members[rank].is_new and not all(member.is_new for member in members):
        seed = generators.derived_seed([members[0].randomness[0]], rank)
        for generator in state._generators:
            generator.seed(seed)
    if is_behind:
        state._note_saved()
        state._keeps_steps = members[0].keeps_steps
