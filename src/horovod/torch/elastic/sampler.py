"""A sampler whose epoch goes on where it was when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch.utils.data

from horovod import context
from horovod.bindings.elastic.sampler import deal_list, shuffled

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the samples of a data set to the ranks, each once in an epoch, while ranks are lost and join.

    Make it an attribute of the state. Call ``record_batch`` after each batch and ``set_epoch`` after each epoch. Every
    rank gets the same number of batches; where that needs it, fewer samples than there are ranks are repeated at the
    end of the epoch. That is seldom once the size of the batches is known, from the first ``record_batch``.

    Args:
        dataset: its length is all that counts.
        shuffle: whether each epoch has another random order.
        seed: of that order; the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        processed_num: samples of this epoch that all ranks together have processed.
        num_replicas: ranks.
        rank: of this process.
        remaining_indices: samples that are left in this epoch, in its order.
        num_samples: samples that this rank has left.
        total_size: samples that all ranks have left, those that are repeated included.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = self.num_replicas = self.rank = self._batch_size = 0
        self._order: tuple[tuple[int, int], Any] | None = None
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; does nothing if this epoch has begun and has samples left.

        Args:
            epoch: its number, the same on all ranks.
        """
        if epoch != self.epoch or self.processed_num >= len(self.dataset):
            self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch.

        Args:
            batch_idx: accepted for Horovod's sake.
            batch_size: samples of one rank; of a last, shorter batch, either its own or the usual size.
        """
        count, is_short = len(self.dataset), batch_size < self._batch_size
        self._batch_size = max(self._batch_size, batch_size)
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, count)
        if is_short and count - self.processed_num < self.num_replicas:
            # The last batch of the epoch, of which other ranks had one sample more.
            self.processed_num = count

    def record_indices(self, indices: Any) -> None:
        """Note that every rank has processed as many samples as this one.

        Args:
            indices: samples that this rank has processed.
        """
        self.processed_num = min(self.processed_num + len(indices) * self.num_replicas, len(self.dataset))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of one of this rank's batches since the last ``reset()``."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, int]:
        """Return what ``load_state_dict`` takes; the same on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num, "batch_size": self._batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict()`` was called."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self._batch_size = state_dict.get("batch_size", self._batch_size)
        self.reset()

    def reset(self) -> None:
        """Deal the samples that are left to the present ranks."""
        world = context.world()
        self.num_replicas, self.rank = world.size, world.rank
        left = self._whole()[self.processed_num :]
        self.indices = left[deal_list(len(left), self.rank, self.num_replicas, self._batch_size)].tolist()
        self.num_samples = len(self.indices)
        all_have_as_many = len(left) % self.num_replicas == 0 or self.num_samples * self.num_replicas > len(left)
        self.total_size = self.num_samples * self.num_replicas if all_have_as_many else len(left)

    @property
    def remaining_indices(self) -> list[int]:
        """See the class."""
        left: list[int] = self._whole()[self.processed_num :].tolist()
        return left

    def _whole(self) -> Any:
        """Return all samples in the order of this epoch."""
        key = (self.epoch, len(self.dataset))
        if self._order is None or self._order[0] != key:
            count = len(self.dataset)
            self._order = key, shuffled(count, self.seed + self.epoch) if self.shuffle else np.arange(count)
        return self._order[1]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the samples that this rank has left."""
        self.reset()
        return iter(self.indices)

    def __len__(self) -> int:
        """Return how many samples this rank has left."""
        return self.num_samples
