"""One rank's batches of arrays, sequences or iterables, while the number of ranks changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from horovod import context
from horovod.bindings.elastic.sampler import Deal, Dealer

__all__ = ["ArrayShard", "StreamShard", "shard"]


def shard(data: Any, batch_size: int, shuffle: bool = False, seed: int = 0) -> Any:
    """Return this rank's batches of some data; every sample is used once per epoch, even if ranks are lost or join.

    Make it an attribute of the state, and iterate over it: a loop covers the rest of the epoch. A batch counts as used
    after a step of ``hvd.elastic.step``, or at ``commit()``. All ranks get the same number of batches.
    Call ``set_epoch`` to begin the next epoch.

    Args:
        data: an array, or tuples, lists and dicts of arrays of one length, whose rows are samples; or a sequence of
            samples; or an iterable of samples that begins anew each time, the same on all ranks.
        batch_size: samples of one rank in a step; the last batch may have one more, or be shorter.
        shuffle: whether each epoch has its own random order; not for iterables without a length.
        seed: seed of the random order; the same on all ranks.

    Returns:
        An iterable of batches: rows of the arrays, or lists of samples.

    Raises:
        ValueError: there is no array, or arrays differ in length; ``shuffle`` is set for an iterable without a length,
            or the iterable cannot restart.
    """
    columns = list(_columns(data))
    if not columns:
        raise ValueError(f"there is nothing to deal. Received: {data!r}")
    if not all(hasattr(column, "__len__") and hasattr(column, "__getitem__") for column in columns):
        if shuffle or iter(data) is data:
            raise ValueError(
                f"a {type(data).__name__} without a length cannot be shuffled, and must begin anew each time it is "
                "iterated over; pass a sequence, or an object whose __iter__ makes a new iterator"
            )
        return StreamShard(data, batch_size)
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"arrays must have one length. Received: {[len(column) for column in columns]}")
    return ArrayShard(Dealer(len(columns[0]), batch_size, shuffle, seed), lambda rows: _rows(data, rows))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


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
    return data[np.asarray(rows)] if _is_array(data) else [data[row] for row in rows]


class ArrayShard:
    """This rank's batches of data with a length; see ``shard``.

    Args:
        dealer: assigns the sample indices.
        pick: returns the batch for a list of sample indices.
    """

    def __init__(self, dealer: Dealer, pick: Callable[[Sequence[int]], Any]) -> None:
        self._dealer, self._pick = dealer, pick
        self.set_epoch, self.confirm, self.reset = dealer.set_epoch, dealer.confirm, dealer.reset
        self.state_dict, self.load_state_dict = dealer.state_dict, dealer.load_state_dict

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._dealer.epoch

    @property
    def is_done(self) -> bool:
        """Whether all samples of the epoch were used."""
        return not self._dealer.left

    def __len__(self) -> int:
        """Return the number of batches left in this epoch."""
        return self._dealer.steps(context.world().size)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of this epoch."""
        world = context.world()
        return map(self._pick, self._dealer.batches(world.rank, world.size))


class StreamShard:
    """This rank's batches of an iterable; see ``shard``. A resumed epoch skips the samples that were used before.

    Args:
        data: the iterable.
        batch_size: samples of one rank in a step.

    Attributes:
        epoch: number of the epoch.
        taken: number of samples of the epoch that all ranks have used.
        is_done: whether all samples of the epoch were used.
    """

    def __init__(self, data: Iterable[Any], batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more. Received: {batch_size}")
        self._data, self._batch_size = data, batch_size
        self.epoch = self.taken = self._handed = 0
        self.is_done = self._ends = False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; does nothing if this epoch has begun and is not done."""
        if epoch != self.epoch or self.is_done:
            self.epoch, self.taken, self.is_done = epoch, 0, False
        self.reset()

    def confirm(self) -> None:
        """Count the batches that were handed out as used."""
        self.taken, self.is_done = self._handed, self.is_done or self._ends

    def reset(self) -> None:
        """Forget batches that were handed out and not confirmed."""
        self._handed, self._ends = self.taken, False

    def state_dict(self) -> dict[str, int]:
        """Return epoch and number of samples used; the same on all ranks."""
        return {"epoch": self.epoch, "taken": self.taken, "is_done": self.is_done}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Load the result of ``state_dict()``."""
        self.epoch, self.taken = state_dict["epoch"], state_dict["taken"]
        self.is_done = bool(state_dict["is_done"])
        self.reset()

    def __iter__(self) -> Iterator[list[Any]]:
        """Iterate over the rest of this epoch."""
        world = context.world()
        samples = itertools.islice(iter(self._data), self.taken, None)
        whole = world.size * self._batch_size
        block = list(itertools.islice(samples, whole))
        self.is_done |= not block
        while block:
            ahead = list(itertools.islice(samples, whole))
            if len(ahead) < world.size:
                # The last samples are too few for a step of their own.
                block, ahead = block + ahead, []
            deal = Deal(len(block), world.size, self._batch_size)
            self._handed += len(block)
            self._ends = not ahead
            yield [block[position] for position in deal.share(0, world.rank)]
            block = ahead
