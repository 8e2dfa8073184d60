"""Pickling of Keras objects: models as ``.keras`` archives; optimizers, losses and metrics as their configuration."""

from __future__ import annotations

import io
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import keras

__all__ = ["dumps", "loads"]


def dumps(objects: dict[str, Any]) -> bytes:
    """Pickle an estimator's or model's parameters.

    Args:
        objects: parameters by name; ``custom_objects`` among them holds classes and functions that models use.
    """
    file = io.BytesIO()
    _Pickler(file).dump(objects)
    return pickle.dumps((cloudpickle.dumps(objects.get("custom_objects") or {}), file.getvalue()))


def loads(packed: bytes) -> dict[str, Any]:
    """Reverse ``dumps``."""
    custom, rest = pickle.loads(packed)
    with keras.saving.custom_object_scope(pickle.loads(custom)):
        objects: dict[str, Any] = pickle.loads(rest)
    return objects


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Model):
            return _model, (_archive(obj),)
        if isinstance(obj, keras.Optimizer | keras.Loss | keras.Metric):
            reduced: tuple[Callable[..., Any], Any] = (_deserialized, (keras.saving.serialize_keras_object(obj),))
            return reduced
        return super().reducer_override(obj)


def _archive(model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        return path.read_bytes()


def _model(archive: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(archive)
        return keras.saving.load_model(path, compile=False, safe_mode=False)


def _deserialized(config: Any) -> Any:
    return keras.saving.deserialize_keras_object(config, safe_mode=False)
