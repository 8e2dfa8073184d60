"""Ranks that mpirun or horovodrun started."""

from __future__ import annotations

from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

__all__ = ["IPUHorovodStrategy", "IPUHorovodStrategyV1"]

IPUHorovodStrategyV1 = IPUHorovodStrategy
