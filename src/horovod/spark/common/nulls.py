"""Refusal of missing values in a DataFrame's columns, in Spark: pandas could not tell them from NaN."""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions, types

from horovod.spark.common.columns import FILL

__all__ = ["column_of", "without_nulls"]


def column_of(name: str) -> Any:
    """Return the column of a name, in which dots and backticks have no meaning.

    Args:
        name: name of the column.
    """
    return functions.col(f"`{name.replace('`', '``')}`")


def without_nulls(dataset: Any, name: str) -> Any:
    """Return a column whose computation fails at a missing value, also inside of arrays.

    Args:
        dataset: the DataFrame.
        name: name of the column.
    """
    error = f"column {name!r} has missing values. {FILL}"

    def checked(column: Any, kind: types.DataType) -> Any:
        if isinstance(kind, types.ArrayType) and kind.containsNull:
            element = kind.elementType
            column = functions.transform(column, lambda entry: checked(entry, element))
        return functions.coalesce(column, functions.raise_error(error))

    return checked(column_of(name), dataset.schema[name].dataType)
