"""The three models of ``models`` in Keras, on whatever backend: the same shapes, and data made up on the spot."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

from horovod.bench.cases import MODELS

__all__ = ["KerasTask", "make_task"]

_CLASSES = 1000


class KerasTask(NamedTuple):
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

    def new_model(self) -> Any:
        """Return one more model with the same weights as every other of this name."""
        return _make_model(self.name, self.tiny)


def _mlp(tiny: bool) -> Any:
    widths = [32, 32] if tiny else [2048] * 6
    hidden = [layers.Dense(width, activation="relu") for width in widths]
    return keras.Sequential([layers.Input((16 if tiny else 1024,)), *hidden, layers.Dense(_CLASSES)])


def _normalization() -> Any:
    # On JAX, Keras' own data parallelism takes the statistics of a batch over all ranks: a model of another kind.
    return layers.GroupNormalization(1) if keras.backend.backend() == "jax" else layers.BatchNormalization()


def _block(x: Any, after: int, stride: int) -> Any:
    y = layers.Conv2D(after, 3, stride, "same", use_bias=False)(x)
    y = layers.ReLU()(_normalization()(y))
    y = _normalization()(layers.Conv2D(after, 3, 1, "same", use_bias=False)(y))
    if x.shape[-1] != after or stride != 1:
        x = layers.Conv2D(after, 1, stride, use_bias=False)(x)
    return layers.ReLU()(layers.Add()([x, y]))


def _resnet(tiny: bool) -> Any:
    width = 4 if tiny else 64
    inputs = layers.Input((32, 32, 3))
    x = layers.Conv2D(width, 3, 1, "same", use_bias=False)(inputs)
    x = layers.ReLU()(_normalization()(x))
    for stage, factor in enumerate([1, 2, 4]):
        x = _block(_block(x, factor * width, 1 if stage == 0 else 2), factor * width, 1)
    return keras.Model(inputs, layers.Dense(_CLASSES)(layers.GlobalAveragePooling2D()(x)))


@keras.saving.register_keras_serializable(package="horovod.bench")
class _Places(layers.Layer):  # type: ignore[misc]
    """Adds to each row of a text what stands for its place."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="places")

    def call(self, x: Any) -> Any:
        return x + self.table


def _gpt(tiny: bool) -> Any:
    vocabulary, length, width, depth, _ = _gpt_sizes(tiny)
    inputs = layers.Input((length,), dtype="int32")
    x = _Places()(layers.Embedding(vocabulary, width)(inputs))
    heads = max(1, width // 64)
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return keras.Model(inputs, layers.Dense(vocabulary, use_bias=False)(layers.LayerNormalization()(x)))


def _gpt_sizes(tiny: bool) -> tuple[int, int, int, int, int]:
    """Words, length of a text, width, blocks, texts."""
    return (64, 8, 16, 2, 2) if tiny else (8192, 128, 384, 6, 4)


def _make_model(name: str, tiny: bool) -> Any:
    keras.utils.set_random_seed(0)
    return {"mlp": _mlp, "resnet": _resnet, "gpt": _gpt}[name](tiny)


def make_task(name: str, rank: int, *, tiny: bool = False) -> KerasTask:
    """Make a model, the same on every rank, and a batch of numpy's, different on every rank.

    Args:
        name: one of ``MODELS``.
        rank: picks the data.
        tiny: a few thousand parameters instead of millions, to see that it runs.

    Raises:
        ValueError: no such model.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    rng = np.random.default_rng(1000 + rank)
    if name == "gpt":
        vocabulary, length, _, _, rows = _gpt_sizes(tiny)
        text = rng.integers(vocabulary, size=(rows, length + 1)).astype(np.int32)
        return KerasTask(name, tiny, _make_model(name, tiny), text[:, :-1], text[:, 1:])
    rows = (4 if tiny else 64) if name == "mlp" else (2 if tiny else 16)
    shape = (rows, 16 if tiny else 1024) if name == "mlp" else (rows, 32, 32, 3)
    inputs = rng.normal(size=shape).astype(np.float32)
    targets = rng.integers(_CLASSES, size=rows).astype(np.int32)
    return KerasTask(name, tiny, _make_model(name, tiny), inputs, targets)
