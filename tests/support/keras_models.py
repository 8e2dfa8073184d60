"""Small models and data for tests of Keras; imported on ranks, where Keras has its backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import horovod.keras as hvd

ROWS, BATCH = 64, 16
EPOCHS = 1


class Exact(keras.layers.Layer):
    """A dense layer in float64 on every backend; Keras' own multiplies matrices in float32 on torch."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(dtype="float64", **kwargs)
        self.units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(keras.ops.sum(keras.ops.expand_dims(x, -1) * self.kernel, axis=1) + self.bias)


class ExactModel(keras.Sequential):
    """Whose loss is a mean in float64."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred - keras.ops.cast(y, "float64")))


def exact(seed: int) -> keras.Model:
    """A model in float64; the seed makes its weights."""
    keras.utils.set_random_seed(seed)
    return ExactModel([keras.layers.Input((8,), dtype="float64"), Exact(16), Exact(3)])


def small(seed: int, **kwargs: Any) -> keras.Model:
    """A model in float32; the seed makes its weights."""
    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    return keras.Sequential([keras.layers.Input((8,)), dense(16, activation="tanh", **kwargs), dense(3, **kwargs)])


def data(dtype: str = "float32") -> tuple[Any, Any]:
    """Inputs and targets, the same on every rank."""
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 8)).astype(dtype), random.normal(size=(ROWS, 3)).astype(dtype)


def shard(values: Any) -> Any:
    """This rank's part of every batch of ``BATCH`` rows."""
    each = BATCH // hvd.size()
    return values.reshape(-1, hvd.size(), each, *values.shape[1:])[:, hvd.rank()].reshape(-1, *values.shape[1:])


def fit(model: keras.Model, callbacks: Any = (), dtype: str = "float32", **kwargs: Any) -> Any:
    """Train on this rank's part, from the first rank's weights."""
    x, y = data(dtype)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    options = {"batch_size": BATCH // hvd.size(), "epochs": EPOCHS, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(shard(x), shard(y), callbacks=[broadcast, *callbacks], **options)


def is_same_everywhere(values: Any) -> bool:
    """Whether all ranks have the same bits."""
    own = [np.asarray(value).tobytes() for value in values]
    return all(other == own for other in hvd.allgather_object(own))


def distance(one: Any, other: Any) -> float:
    """The greatest difference of any two elements."""
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(one, other, strict=True))
