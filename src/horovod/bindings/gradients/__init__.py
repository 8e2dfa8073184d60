"""Gradients of all ranks made the same while backward still runs; for every framework, over a ``GradientAdapter``."""
