"""Instances that poprun started; the first name of the strategy."""

from __future__ import annotations

from khorovod_ipu.tensorflow.strategies import IPUMultiReplicaStrategy

__all__ = ["IPUMultiReplicaStrategy"]
