"""``fit`` of all estimators."""

from __future__ import annotations

import contextlib
import uuid
import warnings
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

from pyspark.ml import Estimator

from horovod.errors import RequestError
from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.kinds import check_flag, check_numbers
from horovod.spark.common.params import ESTIMATOR, Settable, has_params
from horovod.spark.common.persistence import Saved
from horovod.spark.common.reading import ParquetTable
from horovod.spark.common.training import Trained, TrainingJob, columns_of
from horovod.spark.common.writing import find, write

__all__ = ["HorovodEstimator"]

_REQUIRED = ("store", "model", "feature_cols", "label_cols")
_LEAST = dict.fromkeys((
    "num_proc", "batch_size", "val_batch_size", "epochs", "partitions_per_process", "backward_passes_per_step",
    "train_steps_per_epoch", "validation_steps_per_epoch",
), 1) | {"random_seed": 0, "shuffle_buffer_size": 0}  # fmt: skip
#: Lists with an entry for each column of another list.
_ONE_EACH = {"loss_weights": "label_cols", "label_shapes": "label_cols", "input_shapes": "feature_cols"}
#: Folders of the runs that this process trains now.
_training: set[str] = set()


@contextlib.contextmanager
def _alone(path: str, run_id: str) -> Iterator[None]:
    if path in _training:
        raise RequestError(
            f"another thread trains the run {run_id!r} now, and both would use the same files. "
            "Wait for it, or take another run_id"
        )
    _training.add(path)
    try:
        yield
    finally:
        _training.remove(path)


@has_params(ESTIMATOR)
class HorovodEstimator(Settable, Saved, Estimator):
    """Train a model on a DataFrame with several ranks.

    Args:
        params: parameters by name; ``print(estimator.explainParams())`` lists them.

    Raises:
        RequestError: there is no parameter of that name.
        TypeError: a value has the wrong type.
    """

    #: Training function that runs on each rank.
    _train: ClassVar[staticmethod[[TrainingJob], Trained | None]]
    _unsupported: ClassVar[tuple[str, ...]] = ("continuous_cols", "categorical_cols", "data_module")
    _callback: Any = object
    _is_copy = False

    def copy(self, extra: dict[Any, Any] | None = None) -> Any:
        """Return a copy; Spark ML trains copies to try parameters or parts of the data.

        Args:
            extra: parameters that the copy has instead.
        """
        that = super().copy(extra)
        that._is_copy = True
        return that

    def _fit(self, dataset: Any) -> Any:
        self._check()
        backend, value = self._backend(), self.getOrDefault
        validation = value("validation")
        columns = columns_of(self._values())
        if value("transformation_fn"):  # it may create the other columns
            columns = [name for name in columns if name in dataset.columns]
        wanted = [*columns, *([validation] if isinstance(validation, str) else [])]
        if missing := [name for name in wanted if name not in dataset.columns]:
            raise RequestError(
                f"the DataFrame has no column {', '.join(missing)}. It has: {', '.join(dataset.columns)}"
            )
        if not value("transformation_fn"):
            check_numbers(dataset, columns)
        if isinstance(validation, str):
            check_flag(dataset, validation)
        if self._is_copy and value("run_id"):
            raise RequestError(
                f"run_id={value('run_id')!r} names the run of one model, but Spark ML trains copies of this estimator, "
                "each of which would go on from the checkpoint of another. Leave run_id out in CrossValidator and "
                "TrainValidationSplit; elsewhere set parameters before fit(), not in it"
            )
        run_id = self._run_id()
        seed = self._seed(run_id)
        index = f"{run_id}.fit"
        backend.check()
        packed = self._packed()
        store, files = value("store"), backend.num_processes() * value("partitions_per_process")
        with _alone(store.get_run_path(run_id), run_id):
            try:
                train, val = write(dataset, store, index, columns, validation, seed, files)
                return self._run(backend, run_id, seed, train, val, packed)
            finally:
                store.delete(store.get_train_data_path(index))
                store.delete(store.get_val_data_path(index))

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: Any = None) -> Any:
        """Train on existing Parquet files in the store's folders of training and validation data.

        Args:
            params: parameters for this call only.
            dataset_idx: index of the folders, see ``Store.get_train_data_path``.

        Returns:
            The trained model.

        Raises:
            RequestError: there are no files, or a parameter is missing.
        """
        estimator = self.copy(params) if params else self
        estimator._check()
        backend = estimator._backend()
        store = estimator.getOrDefault("store")
        train, val = find(store, store.get_train_data_path(dataset_idx)), None
        if estimator.getOrDefault("validation"):
            val = find(store, store.get_val_data_path(dataset_idx))
        run_id = estimator._run_id()
        with _alone(store.get_run_path(run_id), run_id):
            return estimator._run(backend, run_id, estimator._seed(run_id), train, val, estimator._packed())

    def _values(self) -> Any:
        """Return the parameters as attributes."""
        return SimpleNamespace(**{name: self.getOrDefault(name) for name, *_ in self.ROWS})

    def _backend(self) -> Backend:
        backend, count = self.getOrDefault("backend"), self.getOrDefault("num_proc")
        if backend is not None and count is not None:
            raise RequestError(f"num_proc={count} and backend exclude each other; give the number to the backend")
        return backend or SparkBackend(count)

    def _check(self) -> None:
        value = self.getOrDefault
        if missing := [name for name in _REQUIRED if value(name) is None]:
            raise RequestError(f"{type(self).__name__} needs {', '.join(missing)}")
        for name in self._unsupported:
            if value(name):
                raise RequestError(f"{type(self).__name__} does not support {name}; leave it out")
        if wrong := [each for each in value("callbacks") or () if not isinstance(each, self._callback)]:
            needed = f"{self._callback.__module__}.{self._callback.__name__}"
            raise RequestError(f"callbacks must be instances of {needed}; received {wrong[0]!r}")
        for name, least in _LEAST.items():
            if value(name) is not None and value(name) < least:
                raise RequestError(f"{name} must be {least} or more. Received: {value(name)}")
        for name, columns in _ONE_EACH.items():
            given = value(name) if self.hasParam(name) else None
            if given and len(given) != len(value(columns)):
                raise RequestError(f"{name} has {len(given)} entries, and {columns} has {len(value(columns))}")

    def _run_id(self) -> str:
        run_id: str = self.getOrDefault("run_id") or f"run-{uuid.uuid4().hex[:12]}"
        if "/" in run_id or run_id in (".", ".."):
            raise RequestError(f"run_id names a folder of the store, without '/', '.' or '..'. Received: {run_id!r}")
        return run_id

    def _seed(self, run_id: str) -> int:
        """Return the seed; a resumed run has the same one, so that no row for validation becomes one for training."""
        seed = self.getOrDefault("random_seed")
        return zlib.crc32(run_id.encode()) if seed is None else seed

    def _environment(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {}

    def _packed(self) -> bytes:
        """Pickle the parameters for the ranks."""
        left_here = ("store", "backend", "num_proc")
        objects = {name: self.getOrDefault(name) for name, *_ in self.ROWS if name not in left_here}
        try:
            return self._pack(objects)
        except Exception:  # pickling runs the objects' own code
            for name, value in objects.items():
                try:
                    self._pack({name: value})
                except Exception as error:
                    raise RequestError(f"cannot send {name}={value!r} to the ranks: {error}") from error
            raise

    def _run(
        self, backend: Backend, run_id: str, seed: int, train: ParquetTable, val: ParquetTable | None, packed: bytes
    ) -> Any:
        job = TrainingJob(self.getOrDefault("store"), run_id, seed, train, val, packed, self._unpack)
        trained: Trained = backend.run(type(self)._train, args=(job,), env=self._environment())[0]
        if trained.resumed >= self.getOrDefault("epochs"):
            warnings.warn(
                f"run {run_id!r} had finished its {trained.resumed} epochs, so nothing was trained. "
                "Set more epochs, or another run_id"
            )
        return self._model(self._unpack(packed), trained, run_id)

    def _model(self, objects: dict[str, Any], trained: Trained, run_id: str) -> Any:
        """Return the model with the state that rank 0 returned."""
        raise NotImplementedError

    def _common(self, trained: Trained, run_id: str) -> dict[str, Any]:
        """Parameters that the models of all frameworks have."""
        return {
            "history": trained.history, "run_id": run_id, "row_shapes": trained.shapes,
            "feature_columns": self.getOrDefault("feature_cols"), "label_columns": self.getOrDefault("label_cols"),
        }  # fmt: skip
