"""Writing of a DataFrame to Parquet in a store: each Spark task writes its rows once."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet
from pyspark import TaskContext
from pyspark.sql import functions

from horovod.errors import RequestError
from horovod.spark.common.nulls import column_of, without_nulls
from horovod.spark.common.reading import ParquetTable
from horovod.spark.common.store import Store

__all__ = ["find", "write"]

#: Size of a row group in memory, in bytes; a reader holds one column chunk of it at a time.
_GROUP_BYTES = 16 << 20
_TRAIN, _VAL = 0, 1


def write(
    df: Any, store: Store, index: Any, columns: Sequence[str], validation: float | str | None, seed: int, files: int
) -> tuple[ParquetTable, ParquetTable | None]:
    """Write columns of a DataFrame, split into training and validation rows.

    The DataFrame is computed once, so each row is in exactly one of the two tables; files of failed or repeated tasks
    are never read.

    Args:
        df: the DataFrame.
        store: the target store.
        index: index of the data in the store.
        columns: names of the columns.
        validation: share of the rows, or name of a column that is true or above 0 in rows for validation.
        seed: seed of the random choice of validation rows.
        files: number of tasks.

    Returns:
        Tables of training and validation rows; the second is ``None`` without validation.

    Raises:
        RequestError: one of the tables has no rows.
    """
    folders = [store.get_train_data_path(index), store.get_val_data_path(index)]
    for folder in folders:
        store.delete(folder)
        store.make_folder(folder)
    writer = _Writer(store, folders, list(columns), validation, seed)
    # Other names, because mapInArrow takes a dot in a name for a field of a struct.
    read = [without_nulls(df, name) if name in columns else column_of(name) for name in writer.names]
    renamed = df.select(*(column.alias(f"c{i}") for i, column in enumerate(read)))
    # A shuffle returns its rows in any order, and a resumed run must draw the same ones. Spark hashes no maps.
    sortable = [field.name for field in renamed.schema if "map<" not in field.dataType.simpleString()]
    spread = renamed.repartition(files).sortWithinPartitions(functions.xxhash64(*sortable))
    job = spread.mapInArrow(writer, "part int, path string, groups array<bigint>")
    rows = sorted(job.collect(), key=lambda row: row.path)
    tables = [_table(row for row in rows if row.part == part) for part in (_TRAIN, _VAL)]
    for table, what in zip(tables, ("training", "validation"), strict=True):
        if not table.rows and (what == "training" or validation):
            raise RequestError(
                f"no rows for {what}: the DataFrame has {sum(t.rows for t in tables)} rows, validation={validation!r}"
            )
    return tables[_TRAIN], tables[_VAL] if validation else None


def _table(rows: Iterator[Any]) -> ParquetTable:
    found = list(rows)
    return ParquetTable(tuple(row.path for row in found), tuple(tuple(row.groups) for row in found))


class _Writer:
    """Writes the batches of a task."""

    def __init__(
        self, store: Store, folders: list[str], columns: list[str], validation: float | str | None, seed: int
    ) -> None:
        self.store, self.folders, self.columns = store, folders, columns
        self.validation, self.seed = validation, seed
        self.names = list(dict.fromkeys([*columns, *([validation] if isinstance(validation, str) else [])]))

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        task: Any = TaskContext.get()
        # If a task runs twice, Spark takes the result of one attempt, which names the files of that attempt.
        name = f"part-{task.partitionId():05d}-{task.taskAttemptId()}.parquet"
        draw = np.random.default_rng([self.seed, task.partitionId()])
        files: dict[int, _File] = {}
        for renamed in batches:
            batch = pa.RecordBatch.from_arrays(renamed.columns, names=self.names)
            chosen = self._chosen(batch, draw)
            for part in (_TRAIN, _VAL):
                rows = batch.select(self.columns).filter(chosen if part == _VAL else compute.invert(chosen))
                if rows.num_rows:
                    if part not in files:
                        files[part] = _File(self.store, posixpath.join(self.folders[part], name), rows.schema)
                    files[part].add(rows)
        for part, file in files.items():
            file.close()
            yield pa.RecordBatch.from_pydict({
                "part": pa.array([part], pa.int32()),
                "path": [file.path],
                "groups": pa.array([file.groups], pa.list_(pa.int64())),
            })  # fmt: skip

    def _chosen(self, batch: Any, draw: np.random.Generator) -> Any:
        if not self.validation:
            return pa.array(np.zeros(batch.num_rows, bool))
        if isinstance(self.validation, str):
            flags = batch.column(self.validation)
            return compute.fill_null(flags if pa.types.is_boolean(flags.type) else compute.greater(flags, 0), False)
        return pa.array(draw.random(batch.num_rows) < self.validation)


class _File:
    """One Parquet file, written incrementally."""

    def __init__(self, store: Store, path: str, schema: Any) -> None:
        self.path, self.groups = path, list[int]()
        self.handle = store.fs.open(path, "wb")
        self.writer = parquet.ParquetWriter(self.handle, schema)
        self.waiting: list[Any] = []

    def add(self, rows: Any) -> None:
        self.waiting.append(rows)
        if sum(batch.nbytes for batch in self.waiting) >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            group = pa.Table.from_batches(self.waiting)
            self.writer.write_table(group, row_group_size=group.num_rows)
            self.groups.append(group.num_rows)
            self.waiting = []

    def close(self) -> None:
        self.flush()
        self.writer.close()
        self.handle.close()


def find(store: Store, folder: str) -> ParquetTable:
    """Return the table in a folder, from the footers of its files.

    Raises:
        RequestError: the folder holds no Parquet files.
    """
    files = store.parquet_files(folder)
    if not files:
        raise RequestError(f"no Parquet files in {folder}. Write them there, or call fit(df), which does it")

    def groups(path: str) -> tuple[int, ...]:
        with store.fs.open(path, "rb") as handle:
            footer = parquet.read_metadata(handle)
            return tuple(footer.row_group(index).num_rows for index in range(footer.num_row_groups))

    with ThreadPoolExecutor(8) as pool:
        return ParquetTable(tuple(files), tuple(pool.map(groups, files)))
