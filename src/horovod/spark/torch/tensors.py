"""Conversion of batches to tensors of a model's device and dtype, and prediction with a model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod.errors import RequestError
from horovod.spark.common.model import Predict

__all__ = [
    "dtype_of",
    "load_state",
    "outputs_of",
    "predictor",
    "reshaped",
    "save_state",
    "state_bytes",
    "tensor_of",
    "tensors",
]


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def tensors(
    arrays: Sequence[np.ndarray[Any, Any]], names: Sequence[str], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return arrays as floating-point tensors, as in Horovod's estimators.

    Args:
        arrays: arrays of numbers.
        names: names of their columns, for the message.
        dtype: dtype of the tensors.
        device: device of the tensors.

    Raises:
        RequestError: integers are too large for the dtype.
    """
    made = []
    for array, name in zip(arrays, names, strict=True):
        tensor = torch.from_numpy(np.require(array, requirements=("C", "W"))).to(device=device, dtype=dtype)
        most = 2.0 / torch.finfo(dtype).eps
        if array.dtype.kind in "iu" and array.size and max(abs(int(array.min())), abs(int(array.max()))) > most:
            raise RequestError(
                f"column {name!r} has whole numbers above {most:.0f}, which {dtype} cannot hold. Number the values "
                "from 0 (StringIndexer), or give the model the dtype float64"
            )
        made.append(tensor)
    return made


def tensor_of(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return an array as a tensor: floating-point numbers with the given dtype, whole numbers as they are."""
    tensor = torch.from_numpy(np.require(array, requirements=("C", "W")))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def reshaped(values: Sequence[torch.Tensor], shapes: Any) -> list[torch.Tensor]:
    """Return tensors with the given shapes; unchanged if ``shapes`` is not set."""
    return [value.reshape(shape) for value, shape in zip(values, shapes, strict=True)] if shapes else list(values)


def outputs_of(returned: Any) -> list[torch.Tensor]:
    """Return the result of a model as a list."""
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def predictor(objects: dict[str, Any], keeps_integers: bool = False) -> Predict:
    """Return the prediction function for the model in an estimator's or model's parameters.

    Args:
        objects: the parameters.
        keeps_integers: whether the model gets whole numbers as they are, not as floating-point numbers.
    """
    model: torch.nn.Module = objects["model"].eval()
    dtype, names = dtype_of(model), objects["feature_columns"]

    def predict(features: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        if keeps_integers:
            made = [tensor_of(array, dtype) for array in features]
        else:
            made = tensors(features, names, dtype, torch.device("cpu"))
        inputs = reshaped(made, objects["input_shapes"])
        with torch.inference_mode():
            return [output.double().numpy() for output in outputs_of(model(*inputs))]

    return predict


def save_state(state: Any, file: Any) -> None:
    """Write a state of tensors, numbers and strings to a file; safe loading refuses numbers of NumPy in it.

    Args:
        state: the state; NumPy's numbers in its dicts are replaced by Python's.
        file: a name, or a file open for writing.
    """
    torch.save(_plain(state), file)


def _plain(state: Any) -> Any:
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = _plain(value)
    return type(state)(map(_plain, state)) if type(state) in (list, tuple) else state


def state_bytes(state: Any) -> bytes:
    """Return what ``save_state`` writes."""
    file = io.BytesIO()
    save_state(state, file)
    return file.getvalue()


def load_state(state: bytes) -> Any:
    """Reverse ``state_bytes``; loading never runs code from the bytes."""
    return torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
