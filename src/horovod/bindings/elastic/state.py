"""State of a training that survives a lost rank: values are saved, restored and sent to all ranks."""

from __future__ import annotations

import copy
import hashlib
import io
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from horovod import context
from horovod.bindings.elastic import generators
from horovod.bindings.elastic.notifications import HostUpdateResult
from horovod.bindings.misuse import wrong_argument
from horovod.errors import HostsUpdatedInterrupt
from horovod.logs import logger
from horovod.phrases import few

__all__ = ["ObjectState", "State", "has_state"]


class State:
    """The values that a training function works on; ``run`` keeps them the same on all ranks.

    A subclass defines ``save``, ``restore`` and ``sync``; and ``digest``, to avoid unnecessary copies.

    Args:
        bcast_object: sends an object of rank 0 to all ranks and returns it.
        get_rank: returns this process's rank.

    Attributes:
        progress: number of completed commits and steps of ``hvd.elastic.step``; the furthest rank's state wins.
    """

    progress: int = 0
    #: Value of ``progress`` at the last ``save``.
    _saved_progress: int = 0
    #: Whether steps were completed since the last ``save``: then an error must not restore it.
    _keeps_steps: bool = False
    #: Set by ``run`` while it calls ``sync``: no rank is behind, so nothing needs to be sent.
    _all_equal: bool = False
    #: Set by ``run`` while it calls ``sync``: send the present values, not the saved ones.
    _sync_present: bool = False
    #: This process joined others, and has not received their state yet.
    _lacks_values: bool = False
    #: Whether the ranks have seen a membership change and not yet acted on it.
    _change_is_due: bool = False
    #: The handle of a step's question whether it is to change, until the step is complete; the script's own exception
    #: may have ended it.
    _asked: Any = None
    #: ``progress`` at each of the last failures, since a rank was lost or a step completed.
    _failed_at: Sequence[int] = ()
    #: Whether a function of ``hvd.elastic.step`` runs.
    _is_in_step: bool = False
    #: Whether this process has a function of ``hvd.elastic.step``, which counts the samples of its steps.
    _has_declared_steps: ClassVar[bool] = False
    _generators: Sequence[generators.Generator] = generators.BUILT_IN
    _saved_generators: list[Any] | None = None
    _captured_generators: list[Any] | None = None

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    # -- as in Horovod -------------------------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Add functions to call after each membership change; they see the new size and the old values.

        A new process does not call them, so they must not call collectives.

        Args:
            callbacks: functions without arguments, such as one that adapts the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset()`` and the callbacks; ``run`` calls this after each membership change."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Receive a notification of changed hosts, for the next ``check_host_updates``.

        Args:
            timestamp: time of the change in seconds.
            update_res: a ``HostUpdateResult``.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state and check for changes of the membership. Collective.

        After a lost rank all ranks restore the last commit, unless ``hvd.elastic.step`` has completed steps after it.

        Raises:
            HostsUpdatedInterrupt: the membership is to change; ``run`` handles it.
            PeerLostError: a rank died; ``run`` handles it.
        """
        self.confirm()
        self.save()
        self.progress += 1
        self._note_saved()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let ``run`` renew the membership if it is to change; all ranks do this at the same call. Collective.

        Within a function of ``hvd.elastic.step`` this does nothing: the change comes after the step.

        Raises:
            HostsUpdatedInterrupt: the membership is to change; ``run`` keeps the state and calls the function again.
            PeerLostError: a rank died; ``run`` handles it.
        """
        if self._is_in_step:
            return
        if context.wants_change():
            self.on_hosts_updated(max(time.time(), self._last_updated_timestamp + 1e-3), HostUpdateResult.mixed)
        previous, last, every = self._last_updated_timestamp, self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > last:
                last, every = timestamp, every | update
        previous, self._last_updated_timestamp, every = self._bcast_object((previous, last, every))
        if self._last_updated_timestamp > previous:
            if not State._has_declared_steps:  # the parameters have seen all batches
                self.confirm()
            raise HostsUpdatedInterrupt(every == HostUpdateResult.removed)

    def save(self) -> None:
        """Copy the values to host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the values of the last ``save``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send rank 0's values to all ranks. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to new members; called after each membership change, before the reset callbacks."""

    # -- steps ---------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Return a hash of all values that must be equal on all ranks; if it is empty, values are always sent."""
        return ""

    def capture(self) -> None:
        """Record for ``undo`` the values that a step may change before the ranks know that it failed."""
        self._captured_generators = generators.read(self._generators)

    def undo(self) -> bool:
        """Restore all values recorded by ``capture``.

        Returns:
            False if the step cannot be undone: then the caller must use ``restore``.
        """
        if self._captured_generators is not None:
            generators.write(self._generators, self._captured_generators)
        return True

    def _can_keep_steps(self) -> bool:
        """Whether every rank has all values of the steps it has completed, so that a loss need not undo them."""
        return True

    def confirm(self) -> None:
        """Count the handed-out samples as used; called at each commit, step and, without steps, interrupt."""

    def _drop_unconfirmed(self) -> None:
        """Drop what ``confirm`` has not counted: samples that were handed out, and learning rates."""

    def before_change(self) -> None:
        """Run collectives that need the present members, before a membership change without a lost rank. Collective."""

    def checkpoint(self) -> dict[str, Any]:
        """Return the values to write to a checkpoint: numpy arrays, numbers and strings, in dicts and lists."""
        return {}

    def load_checkpoint(self, values: Mapping[str, Any]) -> None:
        """Load the result of ``checkpoint`` from an earlier job.

        Raises:
            ValueError: the checkpoint does not fit this state.
        """

    def _note_saved(self) -> None:
        self._saved_progress, self._keeps_steps = self.progress, False
        self._saved_generators = generators.read(self._generators)

    def _go_back(self) -> None:
        """Restore the values, progress and random generators of the last ``save``."""
        self.restore()
        self.progress, self._keeps_steps = self._saved_progress, False
        if self._saved_generators is not None:
            generators.write(self._generators, self._saved_generators)


class ObjectState(State):
    """State of plain objects: each keyword becomes an attribute.

    Args:
        bcast_object: as for ``State``.
        get_rank: as for ``State``.
        **kwargs: attributes and their initial values; cloudpickle must be able to pickle them.

    Raises:
        ValueError: a keyword is the name of a method.
    """

    #: How to pickle objects of these types for a digest, where their own way differs between processes.
    _reducers: ClassVar[Mapping[type, Callable[[Any], Any]]] = {}

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._check_names(kwargs)
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._captured_values: dict[str, Any] | None = None
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        ObjectState.save(self)

    def _check_names(self, names: Iterable[str]) -> None:
        if taken := [name for name in names if hasattr(State, name)]:
            raise ValueError(f"a state cannot have an attribute {taken[0]!r}: {type(self).__name__} uses this name")

    def save(self) -> None:
        """Copy the attributes; copy only the ``state_dict()`` of those with ``state_dict`` and ``load_state_dict``."""
        self._saved_state = {name: _copied(value) for name, value in self._states().items()}

    def restore(self) -> None:
        self._load({name: _copied(value) for name, value in self._saved_state.items()})

    def sync(self) -> None:
        """Send the attributes that rank 0 saved last to all ranks. Collective."""
        if self._saved_state and not self._all_equal:
            if self._sync_present:
                self._load(self._bcast_object(self._states()))
            else:
                self._saved_state = self._bcast_object(self._saved_state)
                ObjectState.restore(self)
        self._drop_unconfirmed()

    def digest(self) -> str:
        """Return a hash of the attributes.

        Raises:
            RequestError: one of them cannot be sent to other ranks.
        """
        values = self._states()
        try:
            hashed = hashlib.blake2b(digest_size=16)
            for name, value in values.items():
                hashed.update(name.encode() + _bytes_of(value, self._reducers))
            return hashed.hexdigest() if values else "empty"
        except Exception as error:
            name = next((name for name, value in values.items() if not _is_picklable(value)), "?")
            raise wrong_argument(
                f"{type(self).__name__}.{name}, a {type(getattr(self, name, None)).__name__}, cannot be sent to other "
                f"ranks: {error}. Keep it outside of the state, or give it state_dict() and load_state_dict()"
            ) from error

    def capture(self) -> None:
        """See ``State``; also record which object each attribute refers to."""
        super().capture()
        self._captured_values = self._present()

    def undo(self) -> bool:
        """See ``State``; each attribute refers to its previous object again."""
        for name, value in (self._captured_values or {}).items():
            setattr(self, name, value)
        return super().undo()

    def confirm(self) -> None:
        """Count the samples as used that the attributes' shards have handed out."""
        for value in self._values():
            if _is_dealt(value):
                value.confirm()

    def _drop_unconfirmed(self) -> None:
        for value in self._values():
            if _is_dealt(value):
                value.reset()

    def checkpoint(self) -> dict[str, Any]:
        """Return the attributes."""
        states = self._states().items()
        return {"attributes": {name: value.state if isinstance(value, _Held) else value for name, value in states}}

    def load_checkpoint(self, values: Mapping[str, Any]) -> None:
        """Set the attributes that are in the file and in this state; warn of those that only this state has."""
        known = {name: value for name, value in values["attributes"].items() if name in self._saved_state}
        if missing := [name for name in self._saved_state if name not in known]:
            logger.warning("the checkpoint has no value of %s; the script's own is kept", few(missing))
        present = self._present()
        self._load({n: _Held(v) if has_state(present[n]) else _typed(v, present[n]) for n, v in known.items()})

    def _present(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _states(self) -> dict[str, Any]:
        """Return the attributes by name; those with ``state_dict`` as ``_Held``."""
        return {n: _Held(value.state_dict()) if has_state(value) else value for n, value in self._present().items()}

    def _values(self) -> Iterator[Any]:
        """Yield everything that the state holds."""
        yield from self._present().values()

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            if isinstance(state, _Held):
                getattr(self, name).load_state_dict(state.state)
            else:
                setattr(self, name, state)


class _Held(NamedTuple):
    """Holds the ``state_dict()`` of an attribute."""

    state: Any


def has_state(value: Any) -> bool:
    """Whether ``value`` is kept by its ``state_dict`` and ``load_state_dict``."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_dealt(value: Any) -> bool:
    """Whether ``value`` deals samples and needs ``confirm`` and ``reset`` calls, as ``Dealer`` does."""
    return has_state(value) and hasattr(value, "confirm") and hasattr(value, "reset")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    reducers: Mapping[type, Callable[[Any], Any]]

    def reducer_override(self, obj: Any) -> Any:
        reducer = self.reducers.get(type(obj))
        return super().reducer_override(obj) if reducer is None else reducer(obj)


def _bytes_of(value: Any, reducers: Mapping[type, Callable[[Any], Any]], is_tree: bool = True) -> bytes:
    """Return bytes that are the same for equal values, even if texts are one object on one rank, and two on another."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.reducers, pickler.fast = reducers, is_tree  # fast: no references to what was written before
    try:
        pickler.dump(value)
    except Exception:
        if not is_tree:
            raise
        return _bytes_of(value, reducers, is_tree=False)  # it contains itself, as a class of the script may
    return file.getvalue()


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _typed(value: Any, present: Any) -> Any:
    """Return a value of a checkpoint, which knows plain dicts only, as the same kind of dict as the present one."""
    if not (isinstance(present, dict) and isinstance(value, dict)):
        return value
    typed = copy.copy(present)
    typed.clear()
    typed.update(value)
    return typed


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # some objects cannot be copied, such as locks and open files
        return value
