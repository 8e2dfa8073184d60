"""Which samples of an epoch are left, and which rank takes which of them.

All ranks step together, so the samples that were taken are always the first ones of the epoch's order: one number tells
them. The rest is dealt anew when the number of ranks has changed. Pure: nothing here talks to other ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Deal", "Dealer", "deal_list", "shuffled"]

Positions = np.ndarray[Any, np.dtype[np.int64]]


class Deal(NamedTuple):
    """How the samples that are left are dealt in steps, the same number of steps on every rank.

    The samples of a step go to the ranks in turn, so shares of a step differ by one sample at most, and after any step
    the samples that were taken are the first ones. Fewer samples than ranks at the end join the step before. Only where
    there is none, some ranks get a sample that another rank has, too, because every rank needs one.

    Attributes:
        left: samples that are left.
        size: ranks.
        batch_size: samples of one rank in a step; one more at most in the last step.
    """

    left: int
    size: int
    batch_size: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        whole, rest = divmod(self.left, self.size * self.batch_size)
        return whole + (rest >= self.size or (whole == 0 and rest > 0))

    def taken(self, step: int) -> int:
        """Return how many samples are taken when ``step`` steps are done."""
        return self.left if step >= self.steps else step * self.size * self.batch_size

    def share(self, step: int, rank: int) -> Positions:
        """Return the positions, among the samples that are left, of one rank's batch.

        Args:
            step: from 0.
            rank: from 0.
        """
        start, end = self.taken(step), self.taken(step + 1)
        own = np.arange(start + rank, end, self.size)
        return own if len(own) or start == end else np.array([start + rank % (end - start)])


def deal_list(left: int, rank: int, size: int, batch_size: int = 0) -> Positions:
    """Return the positions of all of one rank's samples, where somebody else makes batches of the same length of them.

    Every rank gets the same number of batches. Where that needs it, the first samples are repeated at the end, fewer
    than there are ranks.

    Args:
        left: samples that are left.
        rank: from 0.
        size: ranks.
        batch_size: samples of one rank in a step; 0 if it is unknown: then all ranks get the same number of samples.
    """
    share, rest = divmod(left, size)
    needs_more = rest > 0 and share % (batch_size or 1) == 0
    total = (share + 1) * size if needs_more else left
    return np.arange(rank, total, size) % max(left, 1)


def shuffled(count: int, seed: int) -> Positions:
    """Return the numbers below ``count`` in a random order, the same wherever the seed is the same."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return np.array(order, np.int64)


class Dealer:
    """Deals the samples of one epoch after the other, each sample once, while the number of ranks changes.

    A batch that was handed out counts as taken only after ``confirm()``: a state calls it when a step is done.

    Args:
        count: samples in an epoch.
        batch_size: samples of one rank in a step.
        shuffle: whether each epoch has another random order.
        seed: of that order; the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        taken: samples of it that were taken.
    """

    def __init__(self, count: int, batch_size: int, shuffle: bool = False, seed: int = 0) -> None:
        if count < 0 or batch_size < 1:
            raise ValueError(f"count must be 0 or more, batch_size 1 or more. Received: {count}, {batch_size}")
        self.count, self.batch_size = count, batch_size
        self._shuffle, self._seed = shuffle, seed
        self.epoch = self.taken = 0
        self._handed = 0
        self._order: tuple[int, Positions] | None = None

    @property
    def left(self) -> int:
        """Samples that are left in this epoch."""
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
        self._handed = self.taken

    def steps(self, size: int) -> int:
        """Return how many steps are left with ``size`` ranks."""
        return Deal(self.left, size, self.batch_size).steps

    def batches(self, rank: int, size: int) -> Iterator[Sequence[int]]:
        """Yield the indices of this rank's batches of the rest of the epoch.

        Args:
            rank: of this process.
            size: number of ranks.
        """
        before, left = self.taken, self.order()[self.taken :]
        deal = Deal(len(left), size, self.batch_size)
        for step in range(deal.steps):
            self._handed = before + deal.taken(step + 1)
            yield left[deal.share(step, rank)].tolist()

    def confirm(self) -> None:
        """Count the batches that were handed out as taken."""
        self.taken = self._handed

    def reset(self) -> None:
        """Forget batches that were handed out and not confirmed."""
        self._handed = self.taken

    def state_dict(self) -> dict[str, int]:
        """Return epoch and number of samples taken; the same on all ranks."""
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on where ``state_dict()`` was called."""
        self.epoch, self.taken = state_dict["epoch"], state_dict["taken"]
        self.reset()
