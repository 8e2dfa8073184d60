"""Loads models whose optimizer is to be a distributed one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from horovod._keras.saving import load_distributed
from horovod.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a model, with a distributed optimizer that goes on where the saved one was.

    It makes no difference whether the saved optimizer was distributed: files name the plain class.

    Args:
        filepath: what ``keras.saving.load_model`` takes.
        custom_optimizers: classes of optimizers that are not Keras' own.
        custom_objects: names and classes, or functions, that are not Keras' own.
        compression: how gradients are sent, such as ``Compression.fp16``.
        legacy_opts: accepted.

    Returns:
        The compiled model; without an optimizer if it was saved without one.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    del legacy_opts
    return load_distributed(
        keras.saving.load_model, filepath, custom_optimizers, custom_objects,
        lambda optimizer: DistributedOptimizer(optimizer, compression=compression),
    )  # fmt: skip
