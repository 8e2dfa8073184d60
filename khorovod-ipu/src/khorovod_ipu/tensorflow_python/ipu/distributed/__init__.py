"""Collectives between instances, and the strategy of PopDist."""

from __future__ import annotations

from khorovod_ipu.tensorflow.instances import allgather, allreduce, broadcast

__all__ = ["allgather", "allreduce", "broadcast"]
