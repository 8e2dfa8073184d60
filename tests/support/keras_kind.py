"""Which Keras a rank has loaded: Keras 3 or tf_keras."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["keras_and_hvd"]


def keras_and_hvd() -> tuple[Any, Any]:
    """Return keras and hvd of this process."""
    if os.environ.get("TF_USE_LEGACY_KERAS"):
        import tensorflow as tf

        import horovod.tensorflow.keras as of_tf

        return tf.keras, of_tf
    import keras

    import horovod.keras as hvd

    return keras, hvd
