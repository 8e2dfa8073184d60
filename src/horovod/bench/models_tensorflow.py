"""The three models of ``models`` in Keras, for TensorFlow: the same shapes, and data made up on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Task", "make_task"]

_CLASSES = 1000
_layers = tf.keras.layers


@dataclass
class Task:
    """A model with one batch of data.

    Attributes:
        name: of the model.
        tiny: whether it is of smoke size.
        model: maps ``inputs`` to logits.
        inputs: one batch.
        targets: class of each row of logits.
    """

    name: str
    tiny: bool
    model: Any
    inputs: Any
    targets: Any

    def loss(self) -> Any:
        """Cross entropy of the model."""
        logits = self.model(self.inputs, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self.targets, logits=logits)
        return tf.reduce_mean(losses)


def _mlp(tiny: bool) -> Any:
    widths = [32, 32] if tiny else [2048] * 6
    hidden = [_layers.Dense(width, activation="relu") for width in widths]
    return tf.keras.Sequential([_layers.Input((16 if tiny else 1024,)), *hidden, _layers.Dense(_CLASSES)])


def _block(x: Any, after: int, stride: int) -> Any:
    y = _layers.Conv2D(after, 3, stride, "same", use_bias=False)(x)
    y = _layers.ReLU()(_layers.BatchNormalization()(y))
    y = _layers.BatchNormalization()(_layers.Conv2D(after, 3, 1, "same", use_bias=False)(y))
    if x.shape[-1] != after or stride != 1:
        x = _layers.Conv2D(after, 1, stride, use_bias=False)(x)
    return _layers.ReLU()(_layers.Add()([x, y]))


def _resnet(tiny: bool) -> Any:
    width = 4 if tiny else 64
    inputs = _layers.Input((32, 32, 3))
    x = _layers.Conv2D(width, 3, 1, "same", use_bias=False)(inputs)
    x = _layers.ReLU()(_layers.BatchNormalization()(x))
    for stage, factor in enumerate([1, 2, 4]):
        x = _block(_block(x, factor * width, 1 if stage == 0 else 2), factor * width, 1)
    return tf.keras.Model(inputs, _layers.Dense(_CLASSES)(_layers.GlobalAveragePooling2D()(x)))


def _gpt(vocabulary: int, length: int, width: int, depth: int) -> Any:
    inputs = _layers.Input((length,), dtype="int32")
    places = _layers.Embedding(length, width)(tf.range(length))
    x = _layers.Embedding(vocabulary, width)(inputs) + places
    heads = max(1, width // 64)
    for _ in range(depth):
        y = _layers.LayerNormalization()(x)
        x = x + _layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = _layers.Dense(4 * width, activation="gelu")(_layers.LayerNormalization()(x))
        x = x + _layers.Dense(width)(y)
    return tf.keras.Model(inputs, _layers.Dense(vocabulary, use_bias=False)(_layers.LayerNormalization()(x)))


def make_task(name: str, rank: int, *, tiny: bool = False) -> Task:
    """Make a model, the same on every rank, and a batch, different on every rank.

    Args:
        name: ``mlp``, ``resnet`` or ``gpt``.
        rank: picks the data.
        tiny: a few thousand parameters instead of millions, to see that it runs.
    """
    tf.keras.utils.set_random_seed(0)
    rng = np.random.default_rng(1000 + rank)
    if name == "gpt":
        vocabulary, length, width, depth, rows = (64, 8, 16, 2, 2) if tiny else (8192, 128, 384, 6, 4)
        text = rng.integers(vocabulary, size=(rows, length + 1)).astype(np.int32)
        model = _gpt(vocabulary, length, width, depth)
        return Task(name, tiny, model, tf.constant(text[:, :-1]), tf.constant(text[:, 1:]))
    rows = (4 if tiny else 64) if name == "mlp" else (2 if tiny else 16)
    shape = (rows, 16 if tiny else 1024) if name == "mlp" else (rows, 32, 32, 3)
    inputs = tf.constant(rng.normal(size=shape).astype(np.float32))
    targets = tf.constant(rng.integers(_CLASSES, size=rows).astype(np.int32))
    return Task(name, tiny, _mlp(tiny) if name == "mlp" else _resnet(tiny), inputs, targets)
