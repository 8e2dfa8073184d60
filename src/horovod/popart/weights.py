"""Broadcast of a session's host weights."""

from __future__ import annotations

import numpy as np

from horovod.bindings.agreement import agree_on_names
from horovod.bindings.misuse import wrong_argument
from horovod.bindings.process_sets import global_process_set
from horovod.popart.runtime import comm
from horovod.popart.sessions import HostReducedSession, Streams, weights_io

__all__ = ["broadcast_weights"]


def broadcast_weights(session: HostReducedSession, root_rank: int = 0) -> None:
    """Copy the root's host weights to every rank; ``weightsFromHost()`` then copies them to the device.

    Collective over all ranks. Later in training, call ``weightsToHost()`` first, which fetches the device's weights.
    A software session broadcasts all weights, also running means; another session only those with reduced gradients.

    Args:
        session: training session after ``prepareDevice()``.
        root_rank: rank that sends its weights.

    Raises:
        RequestError: the session lists no weights.
        MismatchError: the names, or a weight's shape or dtype, differ between ranks; on every rank.
        PeerLostError: a rank died.

    Blocks until all weights have arrived.
    """
    listed = getattr(session, "getWeightIds", None)
    names = sorted(listed() if listed is not None else Streams(session).stores)
    if not names:
        raise wrong_argument(
            "broadcast_weights finds no weights: it takes them from the streams of host reduction, which a training "
            "session with hostAllReduce has after prepareDevice()"
        )
    agree_on_names("broadcast_weights", names, global_process_set)
    infos = {name: session.getInfo(name) for name in names}
    arrays = {name: np.empty(tuple(info.shape()), info.data_type_lcase()) for name, info in infos.items()}
    session.readWeights(weights_io(session, arrays))
    # Match weights by name, because their order may differ between ranks.
    handles = [comm.broadcast_async_(array, root_rank, name=f"weights.{name}") for name, array in arrays.items()]
    for handle in handles:
        comm.synchronize(handle)
    session.writeWeights(weights_io(session, arrays))
