"""The models of ``models_keras`` with a loss in TensorFlow's own words, for loops of one's own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks import models_keras

__all__ = ["Task", "make_task"]


class Task(models_keras.KerasTask):
    """A model with one batch of data, of TensorFlow's tensors."""

    def loss(self) -> Any:
        """Cross entropy of the model."""
        logits = self.model(self.inputs, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self.targets, logits=logits)
        return tf.reduce_mean(losses)


def make_task(name: str, rank: int, *, tiny: bool = False) -> Task:
    """Make a model, the same on every rank, and a batch, different on every rank.

    Args:
        name: one of ``MODELS``.
        rank: picks the data.
        tiny: a few thousand parameters instead of millions, to see that it runs.
    """
    made = models_keras.make_task(name, rank, tiny=tiny)
    return Task(name, tiny, made.model, tf.constant(made.inputs), tf.constant(made.targets))
