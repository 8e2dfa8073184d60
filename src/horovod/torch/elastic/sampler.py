"""A sampler that continues its epoch when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch.utils.data

from horovod import context
from horovod.bindings.elastic.sampler import deal_list, shuffled

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals each sample of a data set once per epoch to the ranks, even if ranks are lost or join.

    Make it an attribute of the state. Call ``record_batch`` after each batch and ``set_epoch`` after each epoch. Every
    rank gets the same number of batches. If needed, fewer samples than there are ranks are repeated at the end of the
    epoch; this is rare once the batch size is known from the first ``record_batch``.

    Args:
        dataset: data set; only its length is used.
        shuffle: whether each epoch has its own random order.
        seed: seed of the random order; the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        processed_num: number of samples of this epoch that all ranks together have processed.
        num_replicas: number of ranks.
        rank: rank of this process.
        remaining_indices: indices of the samples left in this epoch, in its order.
        num_samples: number of samples left for this rank.
        total_size: number of samples left for all ranks, including repeated ones.
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
            epoch: number of the epoch, the same on all ranks.
        """
        if epoch != self.epoch or self.processed_num >= len(self.dataset):
            self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch.

        Args:
            batch_idx: accepted for compatibility with Horovod; ignored.
            batch_size: samples of one rank; for a shorter last batch, either its actual or the usual size.
        """
        count, is_short = len(self.dataset), batch_size < self._batch_size
        self._batch_size = max(self._batch_size, batch_size)
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, count)
        if is_short and count - self.processed_num < self.num_replicas:
            # In the last batch of the epoch, other ranks may have had one sample more.
            self.processed_num = count

    def record_indices(self, indices: Any) -> None:
        """Record that every rank has processed as many samples as this one.

        Args:
            indices: samples that this rank has processed.
        """
        self.processed_num = min(self.processed_num + len(indices) * self.num_replicas, len(self.dataset))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of one of this rank's batches since the last ``reset()``."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, int]:
        """Return the state for ``load_state_dict``; the same on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num, "batch_size": self._batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict()``."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self._batch_size = state_dict.get("batch_size", self._batch_size)
        self.reset()

    def reset(self) -> None:
        """Deal the remaining samples to the present ranks."""
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
        """Iterate over this rank's remaining samples."""
        self.reset()
        return iter(self.indices)

    def __len__(self) -> int:
        """Return the number of this rank's remaining samples."""
        return self.num_samples
