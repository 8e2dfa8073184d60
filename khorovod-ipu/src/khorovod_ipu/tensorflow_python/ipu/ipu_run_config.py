"""How an Estimator runs."""

from __future__ import annotations

from khorovod_ipu.tensorflow.estimator import IPURunConfig, RunConfig

__all__ = ["IPURunConfig", "RunConfig"]
