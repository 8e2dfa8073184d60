"""One rank's batches of arrays or sequences, while the number of ranks changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from horovod import context
from horovod.bindings.elastic.sampler import Dealer
from horovod.bindings.misuse import wrong_argument

__all__ = ["ArrayShard", "shard"]


def shard(data: Any, batch_size: int, shuffle: bool = False, seed: int = 0) -> Any:
    """Return this rank's batches of some data; every sample is used once per epoch, even if ranks are lost or join.

    Make it an attribute of the state, and iterate over it: a loop covers the rest of the epoch. A batch counts as used
    after a step of ``hvd.elastic.step``, or at ``commit()``. All ranks get the same number of batches.
    Call ``set_epoch`` to begin the next epoch.

    Args:
        data: an array or an object of pandas, or tuples, lists and dicts of these, of one length, whose rows are
            samples; or a sequence of samples.
        batch_size: samples of one rank in a step. The last batch may be shorter or have one more; from 4 on it may have
            two more, and has two or more unless too few samples are left for one step.
        shuffle: whether each epoch has its own random order.
        seed: seed of the random order; the same on all ranks.

    Returns:
        An iterable of batches: rows of the arrays, or lists of samples.

    Raises:
        ValueError: there is no array, arrays differ in length, or the data have no length, as iterators.
    """
    columns = list(_columns(data))
    if not columns:
        raise ValueError(f"there is nothing to deal. Received: {data!r}")
    if wrong := [column for column in columns if not (hasattr(column, "__len__") and hasattr(column, "__getitem__"))]:
        raise ValueError(
            "shard() takes arrays and sequences, which have a length and items; pass list(data) if it fits in memory. "
            f"Received: {type(wrong[0]).__name__}"
        )
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"arrays must have one length. Received: {[len(column) for column in columns]}")
    return ArrayShard(lambda rows: _rows(data, rows), len(columns[0]), batch_size, shuffle, seed)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and (hasattr(value, "dtype") or hasattr(value, "iloc"))


def _is_nest(data: Any) -> bool:
    if isinstance(data, list):
        return bool(data) and all(_is_array(each) for each in data)
    return isinstance(data, tuple | Mapping)


def _columns(data: Any) -> Iterator[Any]:
    if _is_nest(data):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _columns(part)
    else:
        yield data


def _rows(data: Any, rows: Sequence[int]) -> Any:
    if isinstance(data, Mapping):
        return {key: _rows(column, rows) for key, column in data.items()}
    if _is_nest(data):
        parts = [_rows(column, rows) for column in data]
        return data._make(parts) if hasattr(data, "_make") else type(data)(parts)
    if _is_array(data):
        return getattr(data, "iloc", data)[np.asarray(rows)]  # pandas finds rows by their labels without iloc
    return [data[row] for row in rows]


class ArrayShard(Dealer):
    """This rank's batches of data with a length; see ``shard``.

    Args:
        pick: returns the batch for a list of sample indices.
        deal: the arguments of ``Dealer``.
    """

    def __init__(self, pick: Callable[[Sequence[int]], Any], *deal: Any) -> None:
        super().__init__(*deal)
        self._pick = pick

    @property
    def is_done(self) -> bool:
        """Whether all samples of the epoch were used."""
        return not self.left

    def __len__(self) -> int:
        """Return the number of batches left in this epoch."""
        return self.steps(context.world().size)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of this epoch.

        Raises:
            RequestError: the ranks have changed since the loop began, so its samples were dealt anew.
        """
        return map(self._pick, self._dealt())

    def _dealt(self) -> Iterator[Sequence[int]]:
        """Yield the sample indices of this rank's batches in the rest of this epoch."""
        world = context.world()
        batches = self.batches(world.rank, world.size)
        while True:
            rows = next(batches, None)
            if context.world() is not world:
                raise wrong_argument(
                    "a loop over a shard goes on after a change of the ranks, which has dealt its samples anew. Begin "
                    "it inside the function of hvd.elastic.run, as in `for batch in state.batches`"
                )
            if rows is None:
                return
            yield rows
