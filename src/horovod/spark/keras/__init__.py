"""Train Keras 3 models on Spark's DataFrames: ``KerasEstimator`` and ``KerasModel``."""

from horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
