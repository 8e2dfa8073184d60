"""Training on a rank: the driver's message, the rank's data, and checkpoints in the store."""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from horovod.bindings.objects import broadcast_object
from horovod.spark.common.reading import Batch, ParquetTable, Reader
from horovod.spark.common.store import Store

__all__ = ["Trained", "Training", "TrainingJob", "columns_of"]

_STATE, _HISTORY = "state", "history.json"


def columns_of(params: Any) -> list[str]:
    """Return the columns that an estimator reads, each once."""
    weights = [params.sample_weight_col] if params.sample_weight_col else []
    removed = params.transformation_removed_fields or []
    return list(dict.fromkeys([*params.feature_cols, *params.label_cols, *weights, *removed]))


@dataclass(frozen=True)
class TrainingJob:
    """Message from the driver to every rank."""

    store: Store
    run_id: str
    seed: int  # seed of all random choices
    train: ParquetTable  # table of training rows
    val: ParquetTable | None  # table of validation rows
    packed: bytes  # the estimator's pickled parameters
    unpack: Callable[[bytes], dict[str, Any]]  # function that unpickles them


@dataclass(frozen=True)
class Trained:
    """Result of rank 0."""

    state: bytes  # state of the trained model, in the framework's own format
    history: Any  # metrics of each epoch
    shapes: list[list[int]]  # shape of a row of each feature column
    resumed: int  # number of epochs restored from a checkpoint


class Training:
    """A rank's data and progress."""

    def __init__(self, job: TrainingJob, rank: int, size: int, set_seed: Callable[[int], Any]) -> None:
        self.job, self.rank = job, rank
        # number of epochs done in the checkpoint, their metrics, and bytes of the state, None without a checkpoint
        self.start, self.history, self.state = self._restored()
        set_seed(self.seed)  # first: layers of Keras choose their own seeds when they are unpickled
        self.params = params = SimpleNamespace(**job.unpack(job.packed))
        if self.is_loud and self.start:  # also for those who have changed the model, which it then does not fit
            print(
                f"run {job.run_id!r} goes on from its checkpoint after epoch {self.start}; for a new run take another "
                "run_id",
                flush=True,
            )

        def reader(table: ParquetTable, what: str, batch_size: int, shuffles: bool) -> Reader:
            return Reader(
                table, job.store, columns_of(params), rank, size, batch_size, what, shuffles,
                params.shuffle_buffer_size or Reader.buffer_rows, job.seed, params.inmemory_cache_all,
                params.transformation_fn, params.transformation_removed_fields or (),
            )  # fmt: skip

        shuffles = params.shuffle and params.shuffle_buffer_size != 0
        self.train = reader(job.train, "training", params.batch_size, shuffles)
        self.val = None
        if job.val:
            self.val = reader(job.val, "validation", params.val_batch_size or params.batch_size, False)
        self.steps: int = params.train_steps_per_epoch or self.train.steps
        self.val_steps: int = params.validation_steps_per_epoch or (self.val.steps if self.val else 0)

    @property
    def is_loud(self) -> bool:
        """Whether this rank prints its progress."""
        return bool(self.params.verbose) and self.rank == 0

    @property
    def seed(self) -> int:
        """Seed of this rank's other random choices, as in dropout: a resumed run must not repeat those it has made."""
        return self.job.seed + self.rank + 1_000_003 * self.start

    @property
    def epochs(self) -> range:
        """The remaining epochs."""
        return range(self.start, max(self.start, self.params.epochs))

    def shapes(self) -> list[list[int]]:
        """Return the shape of a row of each feature column."""
        batch = next(self.train.batches(0))
        return [list(batch[name].shape[1:]) for name in self.params.feature_cols]

    def parts(self, batch: Batch) -> tuple[list[Any], list[Any], Any]:
        """Return the features, the labels and the weights of a batch."""
        params = self.params
        weights = batch[params.sample_weight_col] if params.sample_weight_col else None
        return [batch[name] for name in params.feature_cols], [batch[name] for name in params.label_cols], weights

    def _restored(self) -> tuple[int, list[Any], bytes | None]:
        store, run_id = self.job.store, self.job.run_id
        found = store.get_checkpoints(run_id) if self.rank == 0 and store.saving_runs() else []
        path = broadcast_object(found[-1] if found else "", 0, name="spark.checkpoint")
        if not path:
            return 0, [], None
        with store.fs.open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            return int(re.findall(r"\d+", path)[-1]), json.loads(archive.read(_HISTORY)), archive.read(_STATE)

    def save(self, epochs: int, history: Any, write: Callable[[str], None]) -> None:
        """Write a checkpoint, and remove older ones; on rank 0 only.

        Args:
            epochs: number of epochs done.
            history: metrics of these epochs, JSON-compatible.
            write: function that writes the framework's state to a file of a given name.
        """
        store, run_id = self.job.store, self.job.run_id
        if self.rank or not store.saving_runs():
            return
        older = store.get_checkpoints(run_id)
        with tempfile.TemporaryDirectory() as folder:
            state, packed = Path(folder, _STATE), Path(folder, "packed")
            write(str(state))
            with zipfile.ZipFile(packed, "w") as archive:
                archive.write(state, _STATE)
                archive.writestr(_HISTORY, json.dumps(history))
            name = posixpath.join(store.get_checkpoint_path(run_id), f"epoch-{epochs}.zip")
            store.delete(name)
            store.put(packed, name)
        for path in older:
            if posixpath.basename(path) != posixpath.basename(name):
                store.delete(path)

    def result(self, state: bytes, history: Any, shapes: Sequence[Any]) -> Trained | None:
        """Return this rank's result for the driver; None on all ranks but 0."""
        return None if self.rank else Trained(state, history, list(shapes), self.start)
