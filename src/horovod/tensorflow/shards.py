"""One rank's batches of a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from horovod import context
from horovod.bindings.elastic import shard as shards
from horovod.bindings.elastic.shard import ArrayShard
from horovod.bindings.misuse import wrong_argument
from horovod.tensorflow.unsafe import is_steady

__all__ = ["DatasetShard", "shard"]


def shard(data: Any, batch_size: int, shuffle: bool = False, seed: int = 0) -> Any:
    """Return this rank's batches of some data; every sample is used once per epoch, even if ranks are lost or join.

    Make it an attribute of the state, and iterate over it: a loop covers the rest of the epoch. A batch counts as used
    after a step of ``hvd.elastic.step``, or at ``commit()``. All ranks get the same number of batches.
    Call ``set_epoch`` to begin the next epoch.

    Args:
        data: a ``tf.data.Dataset`` of samples, not of batches, in the same order on all ranks; or an array or tensor,
            or tuples, lists and dicts of them; or a sequence of samples.
        batch_size: samples of one rank in a step. The last batch may be shorter or have one more; from 4 on it may have
            two more, and has two or more unless too few samples are left for one step.
        shuffle: whether each epoch has its own random order; not for datasets: use ``dataset.shuffle`` with a seed.
        seed: seed of the random order; the same on all ranks.

    Returns:
        An iterable of batches.

    Raises:
        RequestError: a dataset is infinite, or has no fixed order, or ``shuffle`` is set for a dataset.
        ValueError: arrays differ in length.
    """
    if not isinstance(data, tf.data.Dataset):
        plain = tf.nest.map_structure(lambda part: part.numpy() if tf.is_tensor(part) else part, data)
        return shards.shard(plain, batch_size, shuffle, seed)
    if shuffle:
        raise wrong_argument(
            "a tf.data.Dataset is not shuffled by shard(). Call dataset.shuffle(count, seed=1, "
            "reshuffle_each_iteration=False) before, with the same seed on every rank"
        )
    return DatasetShard(data, batch_size)


class DatasetShard(ArrayShard):
    """This rank's batches of a dataset; see ``shard``. A resumed epoch skips the samples that were used before."""

    def __init__(self, dataset: tf.data.Dataset, batch_size: int) -> None:
        if not is_steady(dataset):
            raise wrong_argument(
                "the dataset has another order in each iteration or on each rank, so that samples would be lost and "
                "repeated. Give shuffle() seed=1 and reshuffle_each_iteration=False, list_files() shuffle=False, "
                "random() and sample_from_datasets() a seed, and do not set deterministic=False"
            )
        count = int(dataset.cardinality())
        if count == tf.data.INFINITE_CARDINALITY:
            raise wrong_argument("the dataset is infinite. Leave out repeat(): set_epoch() begins it again")
        if count < 0:
            count = int(dataset.reduce(np.int64(0), lambda number, *_: number + 1))
        super().__init__(lambda rows: rows, count, batch_size)
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of this epoch."""
        world, batch_size = context.world(), self.batch_size
        batches: Iterator[Any] | None = None
        for rows in self._dealt():
            if batches is None:  # this rank's samples are every ``size``-th one from its first one on
                own = self._dataset.skip(rows[0]).shard(world.size, 0)
                batches = iter(own.batch(batch_size).prefetch(2))
            batch = next(batches)
            if len(rows) > batch_size:  # the last batch
                parts = [tf.data.Dataset.from_tensors(part) for part in (batch, next(batches))]
                batch = next(iter(parts[0].concatenate(parts[1]).rebatch(len(rows))))
            yield batch
