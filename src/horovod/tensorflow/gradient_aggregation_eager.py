"""Horovod's import path of the helper that accumulates gradients in eager mode."""

from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelperEager

__all__ = ["LocalGradientAggregationHelperEager"]
