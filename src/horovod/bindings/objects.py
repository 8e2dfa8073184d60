"""Collectives on Python objects, for every framework: objects are pickled and sent as numpy bytes.

Received bytes are unpickled. That is safe because the rendezvous has authenticated every member.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from horovod.bindings.misuse import wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.runtime import comm
from horovod.pickling import pickled

__all__ = ["allgather_object", "broadcast_object"]


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Unpicklable:
    """Replaces an object that cannot be pickled, so that no rank waits for it."""

    def __init__(self, rank: int, error: Exception) -> None:
        self.text = f"rank {rank} cannot pickle its object: {type(error).__name__}: {error}"


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send a Python object from one rank to all others.

    Collective over ``process_set``.

    Args:
        obj: any object that cloudpickle can pickle, also lambdas and local classes; read on the root only.
        root_rank: global rank of the sender.
        name: key of the match; ``None`` numbers the call, then all ranks must call in one order.
        process_set: ranks that take part.

    Returns:
        ``obj`` itself on the root, a copy elsewhere.

    Raises:
        RequestError: the object cannot be pickled; on every rank. Or this rank cannot unpickle it.
        MismatchError: ranks named different roots.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks until the object has arrived.
    """
    sending = comm.rank() == root_rank
    payload, error = _pickled(obj) if sending else (b"", None)
    length = np.array([len(payload)])
    comm.broadcast_(length, root_rank, name=name and f"{name}.sz", process_set=process_set)
    wire = _tensor(payload) if sending else comm.empty(int(length[0]), dtype="uint8")
    comm.broadcast_(wire, root_rank, name=name and f"{name}.t", process_set=process_set)
    found = obj if sending and error is None else _unpickled(pickle.loads, wire.data, root_rank)
    if isinstance(found, _Unpicklable):
        raise wrong_argument(found.text) from error
    return found


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Collect one Python object of every rank.

    Collective over ``process_set``.

    Args:
        obj: any object that cloudpickle can pickle; its size may differ between ranks.
        name: key of the match; ``None`` numbers the call, then all ranks must call in one order.
        process_set: ranks that take part.

    Returns:
        The objects in the order of the members' ranks, without those of ranks that joined.

    Raises:
        RequestError: a rank's object cannot be pickled; on every rank. Or this rank cannot unpickle one.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks until all ranks called.
    """
    payload, error = _pickled(obj)
    payload = pickle.dumps(comm.rank()) + payload
    stream = io.BytesIO(comm.allgather(_tensor(payload), name=name, process_set=process_set).data)
    found = []
    # A pickle marks its own end, so the ranks need not send lengths.
    while stream.tell() < stream.getbuffer().nbytes:
        sender = pickle.load(stream)
        found.append(_unpickled(pickle.load, stream, sender))
    if problems := [each.text for each in found if isinstance(each, _Unpicklable)]:
        raise wrong_argument("; ".join(problems)) from error
    return found


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    try:
        return pickled(obj), None
    except Exception as error:
        return pickle.dumps(_Unpicklable(comm.rank(), error)), error


def _unpickled(load: Callable[[Any], Any], source: Any, sender: int) -> Any:
    try:
        return load(source)
    except Exception as error:
        raise wrong_argument(
            f"rank {comm.rank()} cannot unpickle the object of rank {sender}: {type(error).__name__}: {error}"
        ) from error


def _tensor(payload: bytes) -> Bytes:
    tensor: Bytes = comm.empty(len(payload), dtype="uint8")
    tensor[:] = np.frombuffer(payload, dtype=np.uint8)
    return tensor
