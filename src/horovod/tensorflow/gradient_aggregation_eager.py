"""Horovod's import path of the helper that accumulates gradients in eager mode."""

from __future__ import annotations

from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelperEager

__all__ = ["LocalGradientAggregationHelperEager"]
