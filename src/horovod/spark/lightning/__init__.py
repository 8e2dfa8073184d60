"""Train LightningModules on Spark's DataFrames: ``TorchEstimator`` and ``TorchModel``."""

from horovod.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
