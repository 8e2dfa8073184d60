"""``transform`` of all models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import functions, types

from horovod.errors import RequestError
from horovod.spark.common.columns import from_pandas
from horovod.spark.common.kinds import check_numbers, column_dtype
from horovod.spark.common.nulls import without_nulls
from horovod.spark.common.params import MODEL, Settable, has_params
from horovod.spark.common.persistence import Saved

__all__ = ["HorovodModel", "Predict"]

#: Parameters that are not sent to the executors.
_LEFT_HERE = ("history", "optimizer", "loss", "loss_constructors")
#: Number of rows that tell the shapes of outputs: with one, ``squeeze()`` in a model would remove that dimension, too.
_PROBED = 2
#: Takes the features of some rows, returns the outputs.
Predict = Callable[[Sequence[np.ndarray[Any, Any]]], Sequence[np.ndarray[Any, Any]]]


@has_params((*MODEL, ("row_shapes", None, None, "shape of a row of each feature column, as trained")))
class HorovodModel(Settable, Saved, Model):
    """Predict with a trained model: a transformer of Spark ML.

    Args:
        params: parameters by name; ``print(model.explainParams())`` lists them.

    Raises:
        RequestError: there is no parameter of that name.
    """

    @staticmethod
    def _predictor(objects: dict[str, Any]) -> Predict:
        """Return the prediction function; runs on the executors."""
        raise NotImplementedError

    def _transform(self, dataset: Any) -> Any:
        features, labels = self.getOrDefault("feature_columns"), self.getOrDefault("label_columns")
        names = self.getOrDefault("output_cols") or [f"{name}__output" for name in labels]
        if missing := [name for name in features if name not in dataset.columns]:
            raise RequestError(
                f"the DataFrame has no column {', '.join(missing)}. It has: {', '.join(dataset.columns)}"
            )
        check_numbers(dataset, features)
        is_exact = dataset.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
        if len({name if is_exact else name.lower() for name in names}) < len(names):
            raise RequestError(
                f"outputs of the model would share a column: {', '.join(names)}; give setOutputCols() a name of its "
                "own for each output"
            )
        kinds = {field.name: field.dataType for field in dataset.schema}
        whole = [without_nulls(dataset, name) for name in features]
        columns = [
            vector_to_array(column) if isinstance(kinds[name], VectorUDT) else column
            for name, column in zip(features, whole, strict=True)
        ]
        objects = {name: self.getOrDefault(name) for name, *_ in self.ROWS if name not in _LEFT_HERE}
        outputs = self._probe(objects, dataset.select(*columns))
        if len(outputs) != len(names):
            raise RequestError(
                f"the model has {len(outputs)} outputs for {len(names)} columns: {', '.join(names)}; "
                "give setOutputCols() a name for each output"
            )
        if wrong := [output.shape for output in outputs if output.shape[:1] != (_PROBED,)]:
            raise RequestError(
                f"the model must return a row for each row that it gets: for {_PROBED} rows it returned a tensor of "
                f"shape {wrong[0]}"
            )
        shapes = [output.shape[1:] for output in outputs]
        meant = [kinds.get(name) for name in labels] if len(labels) == len(names) else [None] * len(names)
        fields = [_type_of(shape, kind) for shape, kind in zip(shapes, meant, strict=True)]
        function = _Function(self._pack(objects), type(self)._unpack, type(self)._predictor, fields, shapes)
        schema = types.StructType([types.StructField(f"o{i}", plain) for i, (plain, _) in enumerate(fields)])
        hidden = "__horovod_outputs"
        made = dataset.withColumn(hidden, _udf(function, schema)(*columns))
        for i, (name, (_, is_vector)) in enumerate(zip(names, fields, strict=True)):
            column = functions.col(f"{hidden}.o{i}")
            made = made.withColumn(name, array_to_vector(column) if is_vector else column)
        return made.drop(hidden)

    def _probe(self, objects: dict[str, Any], rows: Any) -> Sequence[np.ndarray[Any, Any]]:
        """Return the outputs for a few rows, to learn their shapes."""
        import pandas

        shapes = objects["row_shapes"]
        if shapes is None:
            row = rows.first()
            if row is None:
                raise RequestError("the DataFrame has no rows, and the model does not know the shapes of its inputs")
            frame = pandas.DataFrame({i: [value] * _PROBED for i, value in enumerate(row)})
            inputs = list(from_pandas(frame).values())
        else:
            kinds = [column_dtype(field.dataType) for field in rows.schema]
            inputs = [np.zeros((_PROBED, *shape), kind) for shape, kind in zip(shapes, kinds, strict=True)]
        return type(self)._predictor(self._unpack(self._pack(objects)))(inputs)


def _type_of(shape: Sequence[int], label: Any) -> tuple[Any, bool]:
    """Return the type of an output's column, and whether the column is then converted to a vector."""
    if isinstance(label, VectorUDT):
        return types.ArrayType(types.DoubleType()), True
    if isinstance(label, types.ArrayType) or len(shape) > 1:
        plain: Any = types.DoubleType()
        for _ in range(max(len(shape), 1)):
            plain = types.ArrayType(plain)
        return plain, False
    if math.prod(shape) == 1:
        return types.FloatType() if isinstance(label, types.FloatType) else types.DoubleType(), False
    return types.ArrayType(types.DoubleType()), True


class _Function:
    """Predicts the rows of a partition."""

    def __init__(
        self,
        packed: bytes,
        unpack: Callable[[bytes], dict[str, Any]],
        predictor: Any,
        fields: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self.packed, self.unpack, self.predictor, self.fields, self.shapes = packed, unpack, predictor, fields, shapes

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pandas

        objects = self.unpack(self.packed)
        predict, rows, names = self.predictor(objects), objects["batch_size"], objects["feature_columns"]
        for batch in batches:
            columns = batch if isinstance(batch, tuple) else (batch,)  # with one column, Spark passes a single series
            inputs = from_pandas(pandas.DataFrame({name: c.array for name, c in zip(names, columns, strict=True)}))
            parts = [
                predict([inputs[name][start : start + rows] for name in names])
                for start in range(0, len(columns[0]), rows)
            ]
            whole = [
                np.concatenate([part.reshape(-1, *shape) for part in output])
                for output, shape in zip(zip(*parts, strict=True), self.shapes, strict=True)
            ]
            counts = {len(value) for value in whole} - {len(columns[0])}
            if counts:
                raise RequestError(
                    f"the model made {counts.pop()} outputs from {len(columns[0])} rows. Does column "
                    f"{', '.join(names)} have the shape that the model was trained with, {objects['row_shapes']}?"
                )
            yield pandas.DataFrame(
                {
                    f"o{i}": _cells(value, kind)
                    for i, (value, (kind, _)) in enumerate(zip(whole, self.fields, strict=True))
                }
            )


def _cells(value: np.ndarray[Any, Any], kind: Any) -> Any:
    if not isinstance(kind, types.ArrayType):
        return value.reshape(len(value)).astype(np.float64)
    return value.reshape(len(value), *(value.shape[1:] or (1,))).astype(np.float64).tolist()


def _udf(function: _Function, schema: Any) -> Any:
    import pandas

    def outputs(batches: Any) -> Any:
        return function(batches)

    outputs.__annotations__ = {
        "batches": Iterator[tuple[pandas.Series, ...]],
        "return": Iterator[pandas.DataFrame],
    }
    return functions.pandas_udf(outputs, schema)
