"""Parameters of estimators and models, with getters and setters as in Spark ML."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from horovod.errors import RequestError
from horovod.phrases import nearest
from horovod.spark.common.store import Store

__all__ = ["ESTIMATOR", "MODEL", "Row", "Settable", "has_params"]

#: Name, default, converter (``None`` takes any value), meaning.
Row = tuple[str, Any, Callable[[Any], Any] | None, str]

_NO_EFFECT = "accepted, without effect here"
_INT, _FLOAT, _BOOL = TypeConverters.toInt, TypeConverters.toFloat, TypeConverters.toBoolean
_TEXT, _TEXTS = TypeConverters.toString, TypeConverters.toListString


def _validation(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, int | float) and 0 <= value < 1):
        return value
    raise TypeError(f"expected a share from 0 to 1, or a column's name. Received: {value!r}")


def _store(value: Any) -> Any:
    if not isinstance(value, Store):
        raise TypeError(f"expected a Store, such as Store.create('/shared/folder'). Received: {value!r}")
    return value


ESTIMATOR: tuple[Row, ...] = (
    ("num_proc", None, _INT, "number of ranks; Spark's default number of tasks if None"),
    ("store", None, _store, "Store for data, checkpoints and logs"),
    ("backend", None, None, "Backend that starts the ranks; excludes num_proc"),
    ("model", None, None, "model to train"),
    ("optimizer", None, None, "optimizer of the framework"),
    ("loss", None, None, "loss, or a list of one for each label column"),
    ("loss_weights", None, TypeConverters.toListFloat, "weight of each loss; they share 1 evenly if None"),
    ("sample_weight_col", None, _TEXT, "column of the samples' weights"),
    ("metrics", [], None, "metrics of the framework"),
    ("feature_cols", None, _TEXTS, "columns that are the model's inputs, in their order"),
    ("label_cols", None, _TEXTS, "columns that are the targets, in the order of the model's outputs"),
    ("continuous_cols", None, _TEXTS, "not supported: for NVTabular"),
    ("categorical_cols", None, _TEXTS, "not supported: for NVTabular"),
    ("validation", None, _validation, "share of the rows, or column that is true or above 0 in rows for validation"),
    ("gradient_compression", None, None, "such as hvd.Compression.fp16"),
    ("compress_sparse_cols", False, _BOOL, _NO_EFFECT + ": sparse vectors are stored as they are"),
    ("batch_size", 32, _INT, "rows that a rank trains on in one step"),
    ("val_batch_size", None, _INT, "rows of a step of validation; batch_size if None"),
    ("epochs", 1, _INT, "number of epochs in all, those of a resumed run included"),
    ("verbose", 1, _INT, "0 for no output of the training"),
    ("callbacks", [], TypeConverters.toList, "callbacks of the framework"),
    ("random_seed", None, _INT, "of the split, the order of rows and the framework; made of run_id if None"),
    ("shuffle_buffer_size", None, _INT, "rows that each rank holds to shuffle them; 8192 if None; 0 does not shuffle"),
    ("shuffle", True, _BOOL, "whether the order of the rows differs in each epoch"),
    ("partitions_per_process", 10, _INT, "number of files per rank that the DataFrame is written to"),
    ("run_id", None, _TEXT, "name of the run in the store; a known one resumes after its last checkpoint"),
    ("train_steps_per_epoch", None, _INT, "steps of an epoch; all rows if None"),
    ("validation_steps_per_epoch", None, _INT, "steps of a validation; all rows if None"),
    ("transformation_fn", None, None, "changes a pandas DataFrame of rows before they are batched"),
    ("transformation_edit_fields", None, None, _NO_EFFECT + ": types and shapes come from what the function returns"),
    ("transformation_removed_fields", None, _TEXTS, "columns that only transformation_fn sees"),
    ("train_reader_num_workers", 2, _INT, _NO_EFFECT),
    ("val_reader_num_workers", 2, _INT, _NO_EFFECT),
    ("reader_pool_type", "thread", _TEXT, _NO_EFFECT),
    ("label_shapes", None, None, "shape of each label, its first entry -1 for the batch"),
    ("inmemory_cache_all", False, _BOOL, "whether each rank keeps its rows in memory after the first epoch"),
    ("use_gpu", True, _BOOL, "whether to train on the GPU of the local rank, if there is one"),
    ("mp_start_method", None, _TEXT, _NO_EFFECT),
    ("backward_passes_per_step", 1, _INT, "batches whose gradients are summed before a step"),
    ("tensorflow_dataset_prefetch_buffer_size", None, None, _NO_EFFECT),
    ("data_module", None, None, "not supported: data is read through pyarrow"),
)

MODEL: tuple[Row, ...] = (
    ("model", None, None, "trained model"),
    ("history", None, None, "metrics of each epoch"),
    ("feature_columns", None, _TEXTS, "columns that are the model's inputs"),
    ("label_columns", None, _TEXTS, "columns that the outputs stand for"),
    ("output_cols", None, _TEXTS, "names of the columns of outputs; <label>__output if None"),
    ("run_id", None, _TEXT, "name of the run in the store"),
    ("batch_size", 1024, _INT, "rows that are predicted together"),
)

#: Method names whose spelling in Horovod differs from the parameter's.
_ALSO = {
    "inmemory_cache_all": "InMemoryCacheAll",
    "num_gpus": "NumGPUs",
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
}


def has_params(rows: Iterable[Row]) -> Callable[[type], type]:
    """Return a decorator that gives a class parameters, with ``setX`` and ``getX`` for each."""

    def decorate(cls: type) -> type:
        cls.ROWS = (*getattr(cls, "ROWS", ()), *rows)  # type: ignore[attr-defined]
        for name, _, convert, meaning in rows:
            setattr(cls, name, Param(Params._dummy(), name, meaning, convert))
            camel = "".join(part.capitalize() for part in name.split("_"))
            for spelled in {camel, _ALSO.get(name, camel)}:
                setattr(cls, f"set{spelled}", _setter(name))
                setattr(cls, f"get{spelled}", _getter(name))
        return cls

    return decorate


def _setter(name: str) -> Callable[[Any, Any], Any]:
    def setter(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    setter.__doc__ = f"Set ``{name}``, and return self."
    return setter


def _getter(name: str) -> Callable[[Any], Any]:
    def getter(self: Any) -> Any:
        return self.getOrDefault(name)

    getter.__doc__ = f"Return ``{name}``."
    return getter


class Settable(Params):
    """Base class whose parameters are keywords of the constructor."""

    ROWS: tuple[Row, ...] = ()

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._setDefault(**{name: default for name, default, *_ in self.ROWS})
        self.setParams(**params)

    def setParams(self, **params: Any) -> Any:  # noqa: N802 - Spark's name
        """Set several parameters, and return self.

        Args:
            params: parameters by name.

        Raises:
            RequestError: there is no parameter of that name.
        """
        known = [row[0] for row in self.ROWS]
        for name in params:
            if name not in known:
                guess = nearest(name, known)
                hint = f", meant is probably {guess}" if guess else f". It has: {', '.join(known)}"
                raise RequestError(f"{type(self).__name__} has no parameter {name!r}{hint}")
        return self._set(**params)
