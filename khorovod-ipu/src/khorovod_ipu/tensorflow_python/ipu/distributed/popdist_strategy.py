"""Instances that poprun started."""

from __future__ import annotations

from khorovod_ipu.tensorflow.strategies import IPUMultiReplicaStrategy, PopDistStrategy

__all__ = ["IPUMultiReplicaStrategy", "PopDistStrategy"]
