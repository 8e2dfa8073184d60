"""Reading of a rank's part of a table: as a stream, in the same number of batches as on other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from horovod.errors import RequestError
from horovod.spark.common.columns import check_shapes, from_pandas, to_numpy, to_pandas
from horovod.spark.common.dealing import RowRange, deal, steps_of
from horovod.spark.common.store import Store
from horovod.splits import split_evenly

__all__ = ["Batch", "ParquetTable", "Reader"]

Batch = dict[str, np.ndarray[Any, Any]]
#: Minimum number of rows decoded together; a larger batch size replaces it.
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class ParquetTable:
    """Parquet files."""

    files: tuple[str, ...]  # paths of the files
    groups: tuple[tuple[int, ...], ...]  # for each file, the number of rows of each row group

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(map(sum, self.groups))


@dataclass
class Reader:
    """A rank's part of a table."""

    table: ParquetTable  # the whole table
    store: Store
    columns: Sequence[str]  # names of the columns to read
    rank: int
    size: int  # number of ranks
    batch_size: int  # maximum number of rows of a batch
    what: str = "training"  # the table's name, for messages
    shuffles: bool = False  # whether each pass has its own random order of rows
    buffer_rows: int = 8192  # number of rows shuffled together; it determines the reader's memory
    seed: int = 0  # seed of the random order
    keeps: bool = False  # whether to decode all rows before the first batch, and to hold them in memory
    transform: Callable[[Any], Any] | None = None  # function that changes a pandas DataFrame of rows
    drops: Sequence[str] = ()  # columns to drop after ``transform``
    _kept: list[Batch] = field(default_factory=list)
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of one row of each column read so far

    def __post_init__(self) -> None:
        self.pieces = deal(self.table.groups, self.rank, self.size)
        self.steps = steps_of(self.table.rows, self.size, self.batch_size, self.what)
        rows = sum(piece.stop - piece.start for piece in self.pieces)
        # Split evenly: no last batch of a single row, and almost equal sizes on all ranks.
        self._sizes = [len(part) for part in split_evenly(rows, self.steps)]

    def stream(self, first: int = 0) -> Iterator[Batch]:
        """Yield batches endlessly, in repeated passes over the rank's rows.

        Args:
            first: index of the first batch, counted over all passes.
        """
        whole, skipped = divmod(first, self.steps)
        for number in itertools.count(whole):
            yield from itertools.islice(self.batches(number), skipped if number == whole else 0, None)

    def batches(self, number: int) -> Iterator[Batch]:
        """Yield the batches of one pass.

        Args:
            number: number of the pass; together with seed and rank it determines the order.
        """
        order = np.random.default_rng([self.seed, self.rank, number])
        pool = _Pool(self._chunks(order), self.buffer_rows, order if self.shuffles else None)
        for size in self._sizes:
            yield pool.take(size)

    def _chunks(self, order: np.random.Generator) -> Iterator[Batch]:
        if self.keeps:  # read whole: nobody may come to the end of a pass
            self._kept = self._kept or list(self._read(self.pieces))
            numbers = order.permutation(len(self._kept)) if self.shuffles else range(len(self._kept))
            yield from (self._kept[number] for number in numbers)
            return
        pieces = [self.pieces[i] for i in order.permutation(len(self.pieces))] if self.shuffles else self.pieces
        yield from self._read(pieces)

    def _read(self, pieces: Sequence[RowRange]) -> Iterator[Batch]:
        for path, inside in itertools.groupby(pieces, lambda piece: self.table.files[piece.file]):
            try:
                handle = self.store.fs.open(path, "rb")
            except FileNotFoundError as error:
                raise RequestError(
                    f"a file of the store {self.store.prefix_path} is not there for rank {self.rank}: {path}\n"
                    "Driver, executors and ranks must share the store, as a network file system or fsspec's URLs"
                ) from error
            with handle, parquet.ParquetFile(handle, buffer_size=1 << 20) as file:
                there = file.schema_arrow.names
                names = [name for name in self.columns if name in there]
                if self.transform is None and len(names) < len(self.columns):
                    missing = ", ".join(name for name in self.columns if name not in names)
                    raise RequestError(f"{path} has no column {missing}. It has: {', '.join(there)}")
                for piece in inside:
                    yield from self._piece(file, piece, names)

    def _piece(self, file: Any, piece: RowRange, names: list[str]) -> Iterator[Batch]:
        row = 0
        rows = max(self.batch_size, _ROWS_AT_ONCE)
        for batch in file.iter_batches(rows, row_groups=[piece.group], columns=names):
            start, stop = max(piece.start - row, 0), min(piece.stop - row, batch.num_rows)
            row += batch.num_rows
            if start < stop:
                part = batch.slice(start, stop - start)
                yield self._changed({name: to_numpy(part.column(name), name) for name in names})
            if row >= piece.stop:
                return

    def _changed(self, columns: Batch) -> Batch:
        rows = len(next(iter(columns.values())))
        if self.transform is not None:
            columns = from_pandas(self.transform(to_pandas(columns)))
        columns = {name: value for name, value in columns.items() if name not in self.drops}
        if missing := [name for name in self.columns if name not in columns and name not in self.drops]:
            raise RequestError(f"transformation_fn returned no column {', '.join(missing)}, only {', '.join(columns)}")
        for name, value in columns.items():
            if len(value) != rows:
                raise RequestError(f"transformation_fn returned {len(value)} rows for {rows}; it must keep all rows")
            if value.dtype.kind not in "biufc":
                raise RequestError(
                    f"column {name!r} holds {value.dtype}, no numbers. Encode it first, or in transformation_fn; "
                    "name columns that are not for the model in transformation_removed_fields"
                )
            shape = value.shape[1:]
            check_shapes({shape, self._shapes.setdefault(name, shape)}, name)  # a model may take both without an error
        return columns


class _Pool:
    """Rows that were read and not yet given out, in the order in which they will be."""

    def __init__(self, chunks: Iterator[Batch], buffer_rows: int, order: np.random.Generator | None) -> None:
        self.chunks, self.order = chunks, order
        self.most = buffer_rows if order else 0
        self.least = self.most // 2  # rows left when the next ones are mixed in
        self.rows: Batch = {}
        self.at = self.left = 0

    def take(self, size: int) -> Batch:
        if self.left < max(size, self.least):
            self._fill(size)
        taken = {name: value[self.at : self.at + size] for name, value in self.rows.items()}
        self.at += size
        self.left -= size
        return taken

    def _fill(self, size: int) -> None:
        parts = [{name: value[self.at :] for name, value in self.rows.items()}] if self.left else []
        while self.left < max(size, self.most):
            chunk = next(self.chunks, None)
            if chunk is None:
                self.least = 0
                break
            parts.append(chunk)
            self.left += len(next(iter(chunk.values())))
        self.at = 0
        self.rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if self.order:
            mixed = self.order.permutation(self.left)
            self.rows = {name: value[mixed] for name, value in self.rows.items()}
