"""Assignment of rows to ranks: every row has one rank, and all ranks have the same number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod.errors import RequestError
from horovod.splits import part_of

__all__ = ["RowRange", "deal", "steps_of"]


@dataclass(frozen=True)
class RowRange:
    """Rows of one row group."""

    file: int  # its index
    group: int  # index within the file
    start: int  # first row within the group
    stop: int  # end of the rows within the group


def deal(groups: Sequence[Sequence[int]], rank: int, size: int) -> list[RowRange]:
    """Return a rank's part of a table, in file order; the parts of ranks differ by at most one row.

    Args:
        groups: for each file, the number of rows of each row group.
        rank: rank of the part.
        size: number of ranks.
    """
    first, last = part_of(sum(map(sum, groups)), size, rank)
    pieces, begin = [], 0
    for file, counts in enumerate(groups):
        for group, count in enumerate(counts):
            start, stop = max(first - begin, 0), min(last - begin, count)
            if start < stop:
                pieces.append(RowRange(file, group, start, stop))
            begin += count
    return pieces


def steps_of(rows: int, size: int, batch_size: int, what: str) -> int:
    """Return the number of batches that each rank makes of its part.

    Args:
        rows: number of rows of the table.
        size: number of ranks.
        batch_size: maximum number of rows of a batch.
        what: the table's name, for the message.

    Raises:
        RequestError: there are fewer rows than ranks.
    """
    if rows < size:
        raise RequestError(f"the {what} data has {rows} rows for {size} ranks; each rank needs one at least")
    # With batches of one row, a rank may have one row more than the common number of steps: its last batch gets two.
    return min(-(-part_of(rows, size, 0)[1] // batch_size), rows // size)
