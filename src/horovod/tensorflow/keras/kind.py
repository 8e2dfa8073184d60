"""Detect the version of ``tf.keras``: Keras 3, or with TF_USE_LEGACY_KERAS=1 the older tf_keras."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["LEGACY"]

LEGACY: bool = tf.keras.Model.__module__.startswith("tf_keras.")
