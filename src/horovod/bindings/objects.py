"""Python objects between ranks, written once over ``Collectives``: pickled, then moved as bytes.

What arrives is unpickled. That is safe because every member was authenticated by the rendezvous.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np

from horovod.bindings.collectives import Collectives
from horovod.bindings.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    comm: Collectives,
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a Python object from one rank to all others.

    Collective over ``process_set``.

    Args:
        comm: the collectives of a framework.
        obj: what cloudpickle can pickle, lambdas and local classes too; read on the root only.
        root_rank: global rank that sends.
        name: key of the match; ``None`` numbers the call, then all ranks must call in one order.
        process_set: ranks that take part.

    Returns:
        ``obj`` itself on the root, a copy elsewhere.

    Raises:
        MismatchError: ranks named different roots.
        PeerLostError: a rank died.

    Blocks until the object is here.
    """
    sending = comm.rank() == root_rank
    payload = cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL) if sending else b""
    length = _tensor(comm, np.array([len(payload)], dtype=np.int64).tobytes())
    comm.broadcast_(length, root_rank, name=name and f"{name}.sz", process_set=process_set)
    if sending:
        comm.broadcast_(_tensor(comm, payload), root_rank, name=name and f"{name}.t", process_set=process_set)
        return obj
    received = comm.empty(int(_array(length).view(np.int64)[0]), dtype="uint8")
    comm.broadcast_(received, root_rank, name=name and f"{name}.t", process_set=process_set)
    return pickle.loads(_array(received).data)


def allgather_object(
    comm: Collectives, obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect one Python object of every rank.

    Collective over ``process_set``.

    Args:
        comm: the collectives of a framework.
        obj: what cloudpickle can pickle; its size may differ between ranks.
        name: key of the match; ``None`` numbers the call, then all ranks must call in one order.
        process_set: ranks that take part.

    Returns:
        The objects in the order of the members' ranks, those of ranks that joined left out.

    Raises:
        PeerLostError: a rank died.

    Blocks until all ranks called.
    """
    payload = _tensor(comm, cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    stream = io.BytesIO(_array(comm.allgather(payload, name=name, process_set=process_set)).data)
    found = []
    # A pickle knows where it ends, so no lengths need to travel.
    while stream.tell() < stream.getbuffer().nbytes:
        found.append(pickle.load(stream))
    return found


def _tensor(comm: Collectives, payload: bytes) -> Any:
    tensor = comm.empty(len(payload), dtype="uint8")
    _array(tensor)[:] = np.frombuffer(payload, dtype=np.uint8)
    return tensor


def _array(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the same bytes as a numpy array."""
    return np.asarray(tensor)
