"""Estimators in graphs of TensorFlow 1, which TensorFlow itself no longer has."""

from __future__ import annotations

from khorovod_ipu.tensorflow.estimator import export
from khorovod_ipu.tensorflow.estimator.estimator import IPUEstimator
from khorovod_ipu.tensorflow.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from khorovod_ipu.tensorflow.estimator.run_config import IPURunConfig, RunConfig
from khorovod_ipu.tensorflow.estimator.spec import EstimatorSpec, EvalSpec, IPUEstimatorSpec, ModeKeys, TrainSpec
from khorovod_ipu.tensorflow.estimator.together import train_and_evaluate

__all__ = [
    "BestExporter", "EstimatorSpec", "EvalSpec", "Exporter", "FinalExporter", "IPUEstimator", "IPUEstimatorSpec",
    "IPURunConfig", "LatestExporter", "ModeKeys", "RunConfig", "TrainSpec", "export", "train_and_evaluate",
]  # fmt: skip
