"""The Estimator and its spec."""

from __future__ import annotations

from khorovod_ipu.tensorflow.estimator import IPUEstimator, IPUEstimatorSpec

__all__ = ["IPUEstimator", "IPUEstimatorSpec"]
