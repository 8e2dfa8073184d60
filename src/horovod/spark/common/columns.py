"""Conversion of Arrow columns to numpy arrays: numbers, arrays of one shape, and Spark's vectors."""

from __future__ import annotations

from collections.abc import Mapping, Set
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from horovod.errors import RequestError

__all__ = ["FILL", "check_shapes", "from_pandas", "to_numpy", "to_pandas"]

FILL = "Fill or drop them first: df.fillna(), df.dropna()"
"""Advice about missing values."""
_SPARSE, _DENSE = 0, 1


def to_numpy(column: Any, name: str) -> np.ndarray[Any, Any]:
    """Return a column as an array whose first dimension counts the rows.

    Args:
        column: a ``pyarrow.Array``.
        name: name of the column, for messages.

    Returns:
        An array of numbers; of objects for bytes and strings, which a ``transformation_fn`` converts to numbers.

    Raises:
        RequestError: values are missing, or the rows have different shapes.
    """
    if column.null_count:
        raise RequestError(
            f"column {name!r} has missing values in {column.null_count} of {len(column)} rows that were read together. "
            f"{FILL}"
        )
    kind = column.type
    if pa.types.is_struct(kind) and {field.name for field in kind} >= {"type", "size", "indices", "values"}:
        return _vectors(column, name)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        width = _only(np.asarray(column.value_lengths()), name)
        values = to_numpy(column.flatten(), name)
        return values.reshape(len(column), width, *values.shape[1:])
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _only(widths: np.ndarray[Any, Any], name: str) -> int:
    found = np.unique(widths)
    if len(found) != 1:
        raise RequestError(
            f"column {name!r} has arrays of different lengths: {', '.join(map(str, found[:5]))}. "
            "Pad them to one length first"
        )
    return int(found[0])


def _vectors(column: Any, name: str) -> np.ndarray[Any, Any]:
    """Return Spark vectors, which Arrow stores as structs, as rows of an array; sparse ones become dense."""
    dense = column.field("type").to_numpy(zero_copy_only=False) == _DENSE
    values = column.field("values")
    counts = np.asarray(values.value_lengths())
    sizes = np.asarray(column.field("size").fill_null(0))
    width = _only(np.where(dense, counts, sizes), name)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    if dense.all():
        return np.asarray(flat.reshape(len(column), width))
    row = np.repeat(np.arange(len(column)), counts)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    place[~dense[row]] = column.field("indices").flatten().to_numpy(zero_copy_only=False)
    made = np.zeros((len(column), width))
    made[row, place] = flat
    return made


def to_pandas(columns: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Return a pandas DataFrame; arrays become objects in a column."""
    import pandas

    return pandas.DataFrame({name: value if value.ndim == 1 else list(value) for name, value in columns.items()})


def from_pandas(frame: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns of a pandas DataFrame in the format of ``to_numpy``.

    Raises:
        RequestError: a column has values that are not numbers, or arrays of different shapes.
    """
    return {str(name): _stacked(frame[name].to_numpy(), str(name)) for name in frame.columns}


def check_shapes(shapes: Set[tuple[int, ...]], name: str) -> None:
    """Refuse a column with arrays of several shapes.

    Raises:
        RequestError: there is more than one shape.
    """
    if len(shapes) > 1:
        raise RequestError(
            f"column {name!r} has arrays of different shapes: {sorted(shapes)[:5]}. Pad them to one shape first"
        )


def _stacked(column: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Return a column of arrays, of arrays of arrays, or of decimals as one array of numbers."""
    if column.dtype != object or not len(column):
        return column
    check_shapes({np.shape(entry) for entry in column}, name)
    whole = np.stack([np.asarray(entry) for entry in column])
    if whole.dtype == object and whole.ndim > 1:
        inner = _stacked(whole.ravel(), name)
        return inner.reshape(*whole.shape, *inner.shape[1:])
    return whole.astype(np.float64) if all(isinstance(entry, Decimal) for entry in whole.flat) else whole
