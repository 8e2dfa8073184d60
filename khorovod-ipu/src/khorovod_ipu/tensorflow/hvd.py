"""What the SDK's own copy of Horovod offered beside its strategy."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
from horovod.tensorflow import (
    Adasum,
    Average,
    Sum,
    allgather,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    nccl_built,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "nccl_built",
    "rank",
    "shutdown",
    "size",
]


def allreduce(
    tensor: Any, op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, name: str | None = None
) -> Any:
    """Combine a tensor over all ranks; of IndexedSlices the rows of all ranks are gathered.

    Args:
        tensor: same shape and dtype on every rank.
        op: Average (which None means) or Sum.
        prescale_factor: multiplies the tensor before.
        postscale_factor: multiplies the result.
        name: key of the match; None numbers an eager call.

    Raises:
        NotImplementedError: Adasum.
    """
    if op == Adasum:
        raise NotImplementedError("the strategies of the SDK have no Adasum; horovod.tensorflow has")
    return hvd.allreduce(
        tensor, op=Average if op is None else op, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        name=name,
    )  # fmt: skip


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Return a rank's tensor on every rank.

    Args:
        tensor: same shape and dtype on every rank.
        root_rank: which one.
        name: key of the match; None numbers an eager call.
    """
    return hvd.broadcast(tensor, root_rank, name)
