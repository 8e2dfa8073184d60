"""Horovod's functions, as the SDK had them beside its strategy."""

from __future__ import annotations

from khorovod_ipu.tensorflow.hvd import (
    Adasum,
    Average,
    Sum,
    allgather,
    allreduce,
    broadcast,
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
