"""Weights of a session's host, from one rank to all others."""

from __future__ import annotations

import numpy as np

from horovod.bindings.agreement import agree_on_names
from horovod.bindings.misuse import wrong_argument
from horovod.bindings.process_sets import global_process_set
from horovod.popart.runtime import comm
from horovod.popart.sessions import HostReducedSession, Streams, weights_io

__all__ = ["broadcast_weights"]


def broadcast_weights(session: HostReducedSession, root_rank: int = 0) -> None:
    """Give every rank the root's weights: those of the host; ``weightsFromHost()`` brings them to the device.

    Collective over all ranks. At a later time ``weightsToHost()`` comes first, which fetches the device's.
    All weights of a session in software take part, running means too; of another, those whose gradients are reduced.

    Args:
        session: of training, after ``prepareDevice()``.
        root_rank: the rank whose weights all ranks get.

    Raises:
        RequestError: the session does not say which weights it has.
        MismatchError: the names, or a weight's shape or dtype, differ between ranks; on every rank.
        PeerLostError: a rank died.

    Blocks until all weights are here.
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
    # Names identify weights: their order may differ between ranks.
    handles = [comm.broadcast_async_(array, root_rank, name=f"weights.{name}") for name, array in arrays.items()]
    for handle in handles:
        comm.synchronize(handle)
    session.writeWeights(weights_io(session, arrays))
