"""Compute the samples that are left in an epoch, and their assignment to ranks.

All ranks step together, so the samples already taken are always the first ones of the epoch's order: one number
describes them. The rest is dealt again when the number of ranks changes. Pure: nothing here talks to other ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod.logs import logger

__all__ = ["Deal", "Dealer", "deal_list", "shuffled"]

#: The smallest batch to which two samples may be added.
_TWO_MORE_FIT = 4

Positions = np.ndarray[Any, np.dtype[np.int64]]


class Deal(NamedTuple):
    """Assignment of the remaining samples to steps and ranks, with the same number of steps on every rank.

    The samples of a step go to the ranks in turn, so the shares of a step differ by at most one sample, and after any
    step the taken samples are the first ones. If fewer than two samples for each rank are left at the end (or than one,
    with small batches), they join the previous step: batch normalization fails with one. Without a previous step, some
    ranks may get a single sample, or one that another rank has, too: every rank needs one.

    Attributes:
        left: number of remaining samples.
        size: number of ranks.
        batch_size: samples of one rank in a step; the last step may have two more.
    """

    left: int
    size: int
    batch_size: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        whole, rest = divmod(self.left, self.size * self.batch_size)
        least = 2 if self.batch_size >= _TWO_MORE_FIT else 1
        return whole + (rest >= self.size * least or (whole == 0 and rest > 0))

    def taken(self, step: int) -> int:
        """Return the number of samples taken after ``step`` steps."""
        return self.left if step >= self.steps else step * self.size * self.batch_size

    def share(self, step: int, rank: int) -> Positions:
        """Return the positions of one rank's batch among the remaining samples.

        Args:
            step: index of the step, from 0.
            rank: the rank, from 0.
        """
        start, end = self.taken(step), self.taken(step + 1)
        own = np.arange(start + rank, end, self.size)
        return own if len(own) or start == end else np.array([start + rank % (end - start)])


def deal_list(left: int, rank: int, size: int, batch_size: int = 0) -> Positions:
    """Return the positions of all samples of one rank, for callers that split them into equal batches themselves.

    Every rank gets the same number of batches. If needed, the first samples are repeated at the end, fewer than there
    are ranks.

    Args:
        left: number of remaining samples.
        rank: the rank, from 0.
        size: number of ranks.
        batch_size: samples of one rank in a step; 0 if unknown: then all ranks get the same number of samples.
    """
    share, rest = divmod(left, size)
    needs_more = rest > 0 and share % (batch_size or 1) == 0
    total = (share + 1) * size if needs_more else left
    return np.arange(rank, total, size) % max(left, 1)


def shuffled(count: int, seed: int) -> Positions:
    """Return the numbers below ``count`` in a random order that depends only on the seed."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return np.array(order, np.int64)


class Dealer:
    """Deals each sample of an epoch once, epoch after epoch, while the number of ranks changes.

    A batch that was handed out counts as taken only after ``confirm()``. The state calls ``confirm()`` after each step.

    Args:
        count: number of samples in an epoch.
        batch_size: samples of one rank in a step.
        shuffle: whether each epoch has its own random order.
        seed: seed of the random order; the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        taken: number of samples of the epoch that were taken.
    """

    def __init__(self, count: int, batch_size: int, shuffle: bool = False, seed: int = 0) -> None:
        if count < 0 or batch_size < 1:
            raise ValueError(f"count must be 0 or more, batch_size 1 or more. Received: {count}, {batch_size}")
        self.count, self.batch_size = count, batch_size
        self._shuffle, self._seed = shuffle, seed
        self.epoch = self.taken = 0
        self._handed = 0
        self._has_ended = False  # a loop has come to its end since the last reset() and set_epoch()
        self._order: tuple[int, Positions] | None = None

    @property
    def left(self) -> int:
        """Number of samples left in this epoch."""
        return self.count - self.taken

    def order(self) -> Positions:
        """Return all samples in the order of this epoch."""
        if self._order is None or self._order[0] != self.epoch:
            whole = shuffled(self.count, self._seed + self.epoch) if self._shuffle else np.arange(self.count)
            self._order = self.epoch, whole
        return self._order[1]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; does nothing if this epoch has begun and has samples left."""
        if epoch != self.epoch or not self.left:
            self.epoch, self.taken = epoch, 0
        self.reset()

    def steps(self, size: int) -> int:
        """Return the number of remaining steps with ``size`` ranks."""
        return Deal(self.left, size, self.batch_size).steps

    def batches(self, rank: int, size: int) -> Iterator[Sequence[int]]:
        """Yield the sample indices of this rank's batches in the rest of the epoch.

        Args:
            rank: rank of this process.
            size: number of ranks.
        """
        if self._has_ended and not self.left:  # a loop after a restart has nothing left to do, too, but is the first
            logger.warning("a loop over a shard has no batches: call set_epoch(%d) before it", self.epoch + 1)
        before, left = self.taken, self.order()[self.taken :]
        deal = Deal(len(left), size, self.batch_size)
        for step in range(deal.steps):
            self._handed = before + deal.taken(step + 1)
            yield left[deal.share(step, rank)].tolist()
        self._has_ended = True

    def confirm(self) -> None:
        """Count the batches that were handed out as taken."""
        self.taken = self._handed

    def reset(self) -> None:
        """Forget batches that were handed out and not confirmed."""
        self._handed, self._has_ended = self.taken, False

    def state_dict(self) -> dict[str, int]:
        """Return epoch and number of samples taken; the same on all ranks."""
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Load the result of ``state_dict()``."""
        self.epoch, self.taken = state_dict["epoch"], state_dict["taken"]
        self.reset()
