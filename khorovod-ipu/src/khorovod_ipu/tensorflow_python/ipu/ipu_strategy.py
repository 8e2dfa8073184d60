"""One device, one process."""

from __future__ import annotations

from khorovod_ipu.tensorflow.strategies import IPUStrategy

__all__ = ["IPUStrategy", "IPUStrategyV1"]

IPUStrategyV1 = IPUStrategy
