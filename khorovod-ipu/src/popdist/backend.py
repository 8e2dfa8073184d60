"""Connection of the instances: each instance is a khorovod rank with the same number."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

import horovod.numpy as hvd
from popdist.environment import division

__all__ = [
    "InstanceGroup", "confinement", "connect", "defaultCommunicatorId", "execute_on_instances", "finalizeBackend",
    "group_of", "init", "initializeBackend", "isBackendInitialized", "registerBackend", "registerCommunicator",
    "registerDefaultBackend",
]  # fmt: skip

_Result = TypeVar("_Result")
_DEFAULT_ID = 0


@dataclass(frozen=True)
class InstanceGroup:
    """A group of instances for collectives.

    Attributes:
        members: their indices, ascending.
        process_set: khorovod's process set of the group; None for a single instance.
    """

    members: tuple[int, ...]
    process_set: hvd.ProcessSet | None


class _Backend:
    """State of this process.

    Attributes:
        is_ours: whether popdist called ``hvd.init()``, and must call ``hvd.shutdown()``.
        is_up: whether ``initializeBackend`` was called, without a later ``finalizeBackend``.
        groups: groups by members.
        communicators: groups by communicator id.
    """

    def __init__(self) -> None:
        self.is_ours = self.is_up = self.is_registered = False
        self.groups: dict[tuple[int, ...], InstanceGroup] = {}
        self.communicators: dict[int, InstanceGroup] = {}


_backend = _Backend()
_confined: contextvars.ContextVar[InstanceGroup | None] = contextvars.ContextVar("popdist instances", default=None)


def registerDefaultBackend() -> None:
    """Choose the backend: khorovod, the only one available."""


def registerBackend(path: str) -> None:
    """Refuse to load a library.

    Args:
        path: path of the library.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"registerBackend({path!r}): khorovod is the only backend here; call popdist.init() instead"
    )


def init() -> None:
    """Connect the instances, and disconnect them at the end of the process; do nothing if they are connected.

    Raises:
        RuntimeError: the numbers of processes and instances differ.
        InitError: the instances did not find each other.

    Blocks until all instances called.
    """
    if isBackendInitialized():
        return
    registerDefaultBackend()
    initializeBackend()
    if not _backend.is_registered:
        _backend.is_registered = True
        atexit.register(_at_exit)


def initializeBackend() -> None:
    """Connect the instances.

    Raises:
        RuntimeError: they are connected already, or the numbers of processes and instances differ.
        InitError: the instances did not find each other.

    Blocks until all instances called.
    """
    if isBackendInitialized():
        raise RuntimeError("popdist's backend is initialized already: call initializeBackend() once, or popdist.init()")
    is_ours = not hvd.is_initialized()
    hvd.init()
    try:
        _check_size()
    except RuntimeError:
        if is_ours:
            hvd.shutdown()
        raise
    _backend.is_ours, _backend.is_up = is_ours, True


def _check_size() -> None:
    """Check that there is one process for each instance, in the same order."""
    found = division()
    if not found.is_uniform:
        return
    instances, index = found.total // found.local, found.offset // found.local
    if (hvd.size(), hvd.rank()) == (instances, index):
        return
    if not found.is_set:
        raise RuntimeError(
            f"this is rank {hvd.rank()} of {hvd.size()}, but the POPDIST_ variables are not set. "
            f"Start the program with poprun --num-replicas={hvd.size()} --num-instances={hvd.size()}"
        )
    raise RuntimeError(
        f"this is rank {hvd.rank()} of {hvd.size()}, but the POPDIST_ variables say instance {index} of {instances}; "
        f"start the program with poprun, which sets both"
    )


def finalizeBackend() -> None:
    """Disconnect the instances.

    Raises:
        RuntimeError: the instances are not connected.

    Blocks until all instances called, if there were communicators or calls of ``execute_on_instances``.
    """
    if not isBackendInitialized():
        raise RuntimeError("popdist's backend is not initialized: call popdist.init() before finalizeBackend()")
    if _backend.is_ours and hvd.is_initialized():
        _wait_for_parts()
        hvd.shutdown()
    _backend.is_ours = _backend.is_up = False
    _backend.groups.clear()
    _backend.communicators.clear()


def _at_exit() -> None:
    # Leave the rest to khorovod's exit: if several ranks fail, it first ends the one that caused the failure.
    if _backend.is_ours and hvd.is_initialized():
        _wait_for_parts()


def _wait_for_parts() -> None:
    """Wait for instances that still use a communicator, except after an error."""
    if any(group.process_set for group in _backend.groups.values()) and not hasattr(sys, "last_value"):
        with contextlib.suppress(hvd.HorovodInternalError):
            hvd.allreduce(np.zeros(1), name="popdist: the end of the program")  # barriers have no name


def isBackendInitialized() -> bool:
    """Return whether the instances are connected."""
    return _backend.is_up and hvd.is_initialized()


def connect(what: str) -> None:
    """Raise if the instances are not connected; a call of ``hvd.init()`` also connects them.

    Args:
        what: name of the function that needs the connection, for the message.

    Raises:
        RuntimeError: the instances are not connected.
    """
    if hvd.is_initialized():
        if not _backend.is_up:
            _check_size()
        return
    raise RuntimeError(
        f"{what} needs the other instances, which are not connected. Call popdist.init() once, at the "
        f"beginning of the program on every instance"
    )


def defaultCommunicatorId() -> int:
    """Return the id of the communicator of all instances."""
    return _DEFAULT_ID


def registerCommunicator(instances: Iterable[int], communicatorId: int) -> None:
    """Register a communicator of some instances; all instances must call this, in the same order.

    Args:
        instances: their indices.
        communicatorId: id of the communicator; not that of all instances, and not in use.

    Raises:
        ValueError: an instance does not exist, or the id is in use.
        RuntimeError: the instances are not connected.

    Blocks until all instances called.
    """
    connect("popdist.registerCommunicator()")
    if communicatorId == _DEFAULT_ID or communicatorId in _backend.communicators:
        raise ValueError(f"communicator {communicatorId} exists already; choose another number")
    _backend.communicators[communicatorId] = _group(_checked(instances))


def group_of(communicator: int | None, what: str) -> InstanceGroup:
    """Return the instances on which a collective runs.

    Args:
        communicator: id of a communicator; None for the instances of ``execute_on_instances``, or all outside it.
        what: name of the function, for messages.

    Raises:
        ValueError: the communicator does not exist, or this instance is not in it.
        RuntimeError: the instances are not connected.
    """
    confined = _confined.get()
    if communicator is None and confined is not None:
        return confined
    connect(what)
    if communicator in (None, _DEFAULT_ID):
        return _all_instances()
    group = _backend.communicators.get(communicator)
    if group is None or not _is_alive(group):
        raise ValueError(f"{what}: there is no communicator {communicator}; see popdist.registerCommunicator")
    if hvd.rank() not in group.members:
        raise ValueError(
            f"{what}: instance {hvd.rank()} is not in communicator {communicator}, which has {list(group.members)}"
        )
    return group


def _all_instances() -> InstanceGroup:
    size = hvd.size()
    return InstanceGroup(tuple(range(size)), hvd.global_process_set if size > 1 else None)


def _checked(instances: Iterable[int]) -> tuple[int, ...]:
    members = tuple(sorted(set(instances)))
    count = hvd.size() if hvd.is_initialized() else division().total // division().local
    wrong = [index for index in members if not 0 <= index < count]
    if wrong or not members:
        raise ValueError(f"instances {list(members)}: name at least one of 0 to {count - 1}")
    return members


def _group(members: tuple[int, ...]) -> InstanceGroup:
    """Return the group of ``members``; register a new one, which needs a call on all instances."""
    if len(members) == hvd.size():
        return _all_instances()
    known = _backend.groups.get(members)
    if known is not None and _is_alive(known):
        return known
    process_set = hvd.add_process_set(list(members)) if len(members) > 1 else None
    _backend.groups[members] = InstanceGroup(members, process_set)
    return _backend.groups[members]


def _is_alive(group: InstanceGroup) -> bool:
    """Return whether the process set still exists: the script's ``hvd.shutdown()`` removes all process sets."""
    return group.process_set is None or group.process_set.process_set_id is not None


def execute_on_instances(
    instances: Iterable[int], func: Callable[..., _Result], *args: Any, **kwargs: Any
) -> _Result | None:
    """Call a function on some of the instances; its collectives run only among these instances.

    All instances must call this; those that are not listed continue immediately. For a single listed instance, a call
    by that instance alone is enough.

    Args:
        instances: their indices.
        func: the function.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        The result of the function; None on the other instances.

    Raises:
        ValueError: an instance does not exist, or an outer ``execute_on_instances`` excludes it.
        RuntimeError: several instances are listed and they are not connected.
    """
    members = _checked(instances)
    outer = _confined.get()
    if outer is not None and not set(members) <= set(outer.members):
        raise ValueError(f"instances {list(members)} are not all among {list(outer.members)}, where this runs")
    if len(members) == 1:
        group = InstanceGroup(members, None)
        own = division().offset // division().local
    else:
        connect("popdist.execute_on_instances()")
        own = hvd.rank()
        if outer is not None and outer.members != members and members not in _backend.groups:
            raise ValueError(
                f"instances {list(members)} have no communicator yet, and none can be made inside of "
                f"execute_on_instances. Call registerCommunicator with them outside once"
            )
        group = outer if outer is not None and outer.members == members else _group(members)
    if own not in members:
        return None
    token = _confined.set(group)
    try:
        return func(*args, **kwargs)
    finally:
        _confined.reset(token)


def confinement() -> InstanceGroup | None:
    """Return the instances of the current ``execute_on_instances``, or None outside it."""
    return _confined.get()
