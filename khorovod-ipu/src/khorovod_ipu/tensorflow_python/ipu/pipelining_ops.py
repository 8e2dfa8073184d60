"""Pipelines."""

from __future__ import annotations

from khorovod_ipu.tensorflow.programs import OptimizerFunctionOutput, pipeline

__all__ = ["OptimizerFunctionOutput", "pipeline"]
