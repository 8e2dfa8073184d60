"""Values of a training that survive a loss: saved, restored, and brought to all ranks."""

from __future__ import annotations

import copy
import hashlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

from horovod import context
from horovod.bindings.elastic import generators
from horovod.bindings.elastic.notifications import HostUpdateResult
from horovod.bindings.misuse import wrong_argument
from horovod.errors import HostsUpdatedInterrupt

__all__ = ["ObjectState", "State"]


class State:
    """The values that a training function works on; ``run`` keeps them the same on all ranks.

    A subclass defines ``save``, ``restore`` and ``sync``; and ``digest``, if it wants to be spared copies.

    Args:
        bcast_object: sends an object of rank 0 to all ranks and returns it.
        get_rank: returns this process's rank.

    Attributes:
        progress: completed boundaries: commits, and steps of ``hvd.elastic.step``; the furthest rank's state wins.
    """

    progress: int = 0
    #: Boundaries at the last ``save``.
    _saved_progress: int = 0
    #: Steps were completed since the last ``save``, so that an error must not go back to it.
    _keeps_steps: bool = False
    #: Set by ``run`` while it calls ``sync``: no rank is behind, so nothing needs to be sent.
    _all_equal: bool = False
    #: Set by ``run`` while it calls ``sync``: the present values count, not the saved ones.
    _sync_present: bool = False
    #: This process was new among others, and has not got their state yet.
    _lacks_values: bool = False
    #: A change that the ranks have seen, and have not acted on.
    _change_is_due: bool = False
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
        """Add functions to be called after each change of the membership, with the new size and the old values.

        A process that is new does not call them, so they must not call collectives.

        Args:
            callbacks: functions without arguments, such as one that adapts the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset()`` and the callbacks; ``run`` does so after each change of the membership."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take the notice that hosts have changed, for the next ``check_host_updates``.

        Args:
            timestamp: when, in seconds.
            update_res: a ``HostUpdateResult``.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state and check for changes of the membership. Collective.

        After a loss all ranks go back to the last commit, unless steps of ``hvd.elastic.step`` came after it.

        Raises:
            HostsUpdatedInterrupt: the membership is to change; ``run`` takes it.
            PeerLostError: a rank died; ``run`` takes it.
        """
        self.confirm()
        self.save()
        self.progress += 1
        self._note_saved()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let ``run`` renew the membership if it is to change, at the same call on all ranks. Collective.

        Raises:
            HostsUpdatedInterrupt: it is; ``run`` takes it, calls the function again, and keeps the state.
            PeerLostError: a rank died; ``run`` takes it.
        """
        if context.wants_change():
            self.on_hosts_updated(max(time.time(), self._last_updated_timestamp + 1e-3), HostUpdateResult.mixed)
        previous, last, every = self._last_updated_timestamp, self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > last:
                last, every = timestamp, every | update
        previous, self._last_updated_timestamp, every = self._bcast_object((previous, last, every))
        if self._last_updated_timestamp > previous:
            raise HostsUpdatedInterrupt(every == HostUpdateResult.removed)

    def save(self) -> None:
        """Copy the values to host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the values that were saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks rank 0's values. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to new members; called after each change, before the reset callbacks."""

    # -- steps ---------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Return a hash of all values that must be equal on all ranks; empty: not known, so they are always sent."""
        return ""

    def capture(self) -> None:
        """Note what a failed step may change before the ranks know that it has failed; for ``undo``."""
        self._captured_generators = generators.read(self._generators)

    def undo(self) -> bool:
        """Set everything back to where ``capture`` was called.

        Returns:
            False where that is not possible: the state must be restored.
        """
        if self._captured_generators is not None:
            generators.write(self._generators, self._captured_generators)
        return True

    def confirm(self) -> None:
        """Count the samples that were handed out as used; called at each boundary."""

    def before_change(self) -> None:
        """Do what needs the present members, before they change without a loss. Collective."""

    def checkpoint(self) -> dict[str, Any]:
        """Return what to write to a file: arrays of numpy, numbers and texts, in dicts and lists."""
        return {}

    def load_checkpoint(self, values: Mapping[str, Any]) -> None:
        """Take what ``checkpoint`` returned in an earlier job.

        Raises:
            ValueError: it is for something else.
        """

    def _note_saved(self) -> None:
        self._saved_progress, self._keeps_steps = self.progress, False
        self._saved_generators = generators.read(self._generators)

    def _go_back(self) -> None:
        """Restore what was saved last."""
        self.restore()
        self.progress, self._keeps_steps = self._saved_progress, False
        if self._saved_generators is not None:
            generators.write(self._generators, self._saved_generators)


class ObjectState(State):
    """A state of plain objects: each keyword becomes an attribute.

    Args:
        bcast_object: as for ``State``.
        get_rank: as for ``State``.
        **kwargs: attributes and their first values; what cloudpickle can pickle.

    Raises:
        ValueError: a keyword is the name of a method.
    """

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
        """Copy the attributes; of those with ``state_dict`` and ``load_state_dict``, their state."""
        self._saved_state = {name: _copied(value) for name, value in self._states().items()}

    def restore(self) -> None:
        """Set the attributes that were saved last."""
        self._load({name: _copied(value) for name, value in self._saved_state.items()})

    def sync(self) -> None:
        """Give all ranks the attributes that rank 0 saved last. Collective."""
        if self._saved_state and not self._all_equal:
            if self._sync_present:
                self._load(self._bcast_object(self._states()))
            else:
                self._saved_state = self._bcast_object(self._saved_state)
                ObjectState.restore(self)
        for value in self._values():
            if _is_dealt(value):
                value.reset()

    def digest(self) -> str:
        """Return a hash of the attributes.

        Raises:
            RequestError: one of them cannot be sent to other ranks.
        """
        values = self._states()
        try:
            return hashlib.blake2b(cloudpickle.dumps(values), digest_size=16).hexdigest() if values else "empty"
        except Exception as error:
            name = next((name for name, value in values.items() if not _is_picklable(value)), "?")
            raise wrong_argument(
                f"{type(self).__name__}.{name}, a {type(getattr(self, name, None)).__name__}, cannot be sent to other "
                f"ranks: {error}. Keep it outside of the state, or give it state_dict() and load_state_dict()"
            ) from error

    def capture(self) -> None:
        """See ``State``; also which objects the attributes are."""
        super().capture()
        self._captured_values = self._present()

    def undo(self) -> bool:
        """See ``State``; attributes become the objects again that they were."""
        for name, value in (self._captured_values or {}).items():
            setattr(self, name, value)
        return super().undo()

    def confirm(self) -> None:
        """Count the samples that shards among the attributes have handed out as used."""
        for value in self._values():
            if _is_dealt(value):
                value.confirm()

    def checkpoint(self) -> dict[str, Any]:
        """Return the attributes."""
        states = self._states().items()
        return {"attributes": {name: value.state if isinstance(value, _Held) else value for name, value in states}}

    def load_checkpoint(self, values: Mapping[str, Any]) -> None:
        """Set the attributes that are in the file and in this state."""
        known = {name: value for name, value in values["attributes"].items() if name in self._saved_state}
        self._load({name: _Held(value) if _has_state(getattr(self, name)) else value for name, value in known.items()})

    def _present(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _states(self) -> dict[str, Any]:
        """Return the attributes, or their states, by name."""
        return {n: _Held(value.state_dict()) if _has_state(value) else value for n, value in self._present().items()}

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
    """Stands for an object that keeps its own state."""

    state: Any


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_dealt(value: Any) -> bool:
    """Whether it deals samples and must be told which of them were used, as ``Dealer`` does."""
    return _has_state(value) and hasattr(value, "confirm") and hasattr(value, "reset")


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # some objects cannot be copied, such as locks and open files
        return value
