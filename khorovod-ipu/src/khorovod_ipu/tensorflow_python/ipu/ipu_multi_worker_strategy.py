"""Workers that TF_CONFIG names, over gRPC."""

from __future__ import annotations

from khorovod_ipu.tensorflow.strategies import IPUMultiWorkerStrategy

__all__ = ["IPUMultiWorkerStrategy", "IPUMultiWorkerStrategyV1"]

IPUMultiWorkerStrategyV1 = IPUMultiWorkerStrategy
