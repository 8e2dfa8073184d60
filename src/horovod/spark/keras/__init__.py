"""Train Keras 3 models on Spark's DataFrames: ``KerasEstimator`` and ``KerasModel``."""

from __future__ import annotations

from horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
