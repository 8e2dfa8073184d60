"""Estimators in graphs of TensorFlow 1; TensorFlow itself no longer has them."""

from __future__ import annotations

from khorovod_ipu.tensorflow.estimator import export
from khorovod_ipu.tensorflow.estimator.estimator import IPUEstimator
from khorovod_ipu.tensorflow.estimator.run_config import IPURunConfig, RunConfig
from khorovod_ipu.tensorflow.estimator.spec import EstimatorSpec, EvalSpec, IPUEstimatorSpec, ModeKeys, TrainSpec
from khorovod_ipu.tensorflow.estimator.together import train_and_evaluate

__all__ = [
    "EstimatorSpec", "EvalSpec", "IPUEstimator", "IPUEstimatorSpec", "IPURunConfig", "ModeKeys", "RunConfig",
    "TrainSpec", "export", "train_and_evaluate",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name.endswith("Exporter"):
        raise AttributeError(f"{name} is not imitated: call export_saved_model() after train_and_evaluate()")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
