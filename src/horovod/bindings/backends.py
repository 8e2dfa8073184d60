"""Horovod's questions about what it was built with; scripts ask them to choose a way of working.

There is nothing to build here, and no MPI, Gloo or NCCL underneath, so the answer is always no.
"""

from __future__ import annotations

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_enabled() -> bool:
    """Return whether ranks meet over MPI."""
    return False


def mpi_built() -> bool:
    """Return whether MPI moves data."""
    return False


def mpi_threads_supported() -> bool:
    """Refuse, as there is no MPI to ask.

    Raises:
        ValueError: always.
    """
    raise ValueError("mpi_threads_supported() asks MPI, and this job does not run over MPI; check mpi_enabled() first")


def gloo_enabled() -> bool:
    """Return whether ranks meet over Gloo."""
    return False


def gloo_built() -> bool:
    """Return whether Gloo moves data."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL that moves data, or 0."""
    return 0


def ddl_built() -> bool:
    """Return whether IBM's DDL moves data."""
    return False


def ccl_built() -> bool:
    """Return whether oneCCL moves data."""
    return False


def cuda_built() -> bool:
    """Return whether collectives run on NVIDIA GPUs; their tensors go through host memory."""
    return False


def rocm_built() -> bool:
    """Return whether collectives run on AMD GPUs."""
    return False
