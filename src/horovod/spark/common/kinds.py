"""Types of the columns that models take: numbers, booleans, arrays of them, vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types

from horovod.errors import RequestError

__all__ = ["check_flag", "check_numbers", "column_dtype"]

_DTYPES = {"boolean": "bool", "tinyint": "i1", "smallint": "i2", "int": "i4", "bigint": "i8", "float": "f4"}


def _is_number(kind: types.DataType) -> bool:
    return isinstance(kind, types.NumericType | types.BooleanType)


def _has_numbers(kind: types.DataType) -> bool:
    if isinstance(kind, VectorUDT):
        return True
    while isinstance(kind, types.ArrayType):
        kind = kind.elementType
    return _is_number(kind)


def column_dtype(kind: types.DataType) -> np.dtype[Any]:
    """Return the dtype of numpy for the numbers of a column."""
    while isinstance(kind, types.ArrayType):
        kind = kind.elementType
    return np.dtype(_DTYPES.get(kind.simpleString(), "f8"))  # also for decimals


def _check(df: Any, columns: Sequence[str], allows: Callable[[types.DataType], bool], allowed: str) -> None:
    if wrong := [name for name in columns if not allows(df.schema[name].dataType)]:
        kinds = ", ".join(f"{name} of {df.schema[name].dataType.simpleString()}" for name in wrong)
        raise RequestError(f"{allowed}. Received: {kinds}")


def check_numbers(df: Any, columns: Sequence[str]) -> None:
    """Check that a model can take the columns of a DataFrame.

    Raises:
        RequestError: a column holds something else.
    """
    _check(df, columns, _has_numbers, "the columns must hold numbers, booleans, arrays of them, or vectors")


def check_flag(df: Any, column: str) -> None:
    """Check that a column can choose rows for validation.

    Raises:
        RequestError: it holds something else than numbers or booleans.
    """
    _check(df, [column], _is_number, "the column of validation must hold numbers or booleans")
