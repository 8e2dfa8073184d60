"""``poptorch.DataLoader``: combines batches for all micro-batches, replicas and device iterations of one call, and
gives each process its own part of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from poptorch.choices import DataLoaderMode
from poptorch.options import Options

__all__ = ["AsynchronousDataAccessor", "DataLoader"]


class _PartSampler(Sampler[int]):
    """Samples of one process, in order, or shuffled over all processes and then divided.

    Args:
        length: number of samples of all processes together.
        process: number of this process.
        processes: number of processes.
        step: number of samples per combined batch.
        seed: seed of the shuffling, the same on all processes; None for no shuffling.
        drops_last: whether to drop samples that do not fill a batch.
    """

    def __init__(
        self, length: int, process: int, processes: int, step: int, seed: int | None, drops_last: bool
    ) -> None:
        self._length, self._process, self._processes, self._seed = length, process, processes, seed
        self._epoch = 0
        if drops_last:
            # All processes need the same number of batches: a process with one more would wait for the others for ever.
            self._own = length // (step * processes) * step if processes > 1 else length
            self._each = self._own
        else:
            self._each = -(-length // processes)
            self._own = max(0, min(self._each, length - process * self._each))

    def __len__(self) -> int:
        return self._own

    def __iter__(self) -> Iterator[int]:
        first = self._process * self._each
        if self._seed is None:
            return iter(range(first, first + self._own))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        self._epoch += 1
        order = torch.randperm(self._length, generator=generator)
        return iter(order[first : first + self._own].tolist())


class _Terminated:
    """Mixin: a ``with`` block ends by ``terminate()``."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self: Any, *_: object) -> None:
        self.terminate()


class DataLoader(_Terminated, torch.utils.data.DataLoader[Any]):
    """A data loader of torch whose batches feed one call of a model.

    Args:
        options: options of the model that gets the batches.
        dataset: source of the samples.
        batch_size: size of one micro-batch of one replica; None for no batches.
        shuffle: whether to reshuffle in each epoch; with ``randomSeed`` the order does not depend on the number of
            processes.
        num_workers: number of processes that load data.
        drop_last: whether to drop samples that do not fill a batch.
        persistent_workers: whether these processes stay alive between epochs; by default yes if there are any.
        auto_distributed_partitioning: whether each process gets its own part of the data.
        mode: without effect on batches, which ``num_workers`` processes or the caller load.
        async_options: accepted, without effect.
        rebatched_worker_size: accepted, without effect.
        **kwargs: more arguments of torch's data loader.

    Raises:
        ValueError: the data set has less than one batch for each process; or it has no length, or a sampler other than
            DistributedSampler, but several processes must divide it; or they shuffle without a common seed.
        NotImplementedError: ``AsyncRebatched`` for samples of several workers that have no common order.
    """

    def __init__(
        self,
        options: Options,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(options, Options):
            raise TypeError(f"the first argument of poptorch.DataLoader is options, received {type(options).__name__}")
        options._freeze()
        self._options = options
        self._mode = DataLoaderMode(mode)
        if self._mode == DataLoaderMode.AsyncRebatched and isinstance(dataset, IterableDataset) and num_workers > 1:
            raise NotImplementedError(
                f"mode=AsyncRebatched, an IterableDataset and num_workers={num_workers} are not imitated together: a "
                f"batch has samples of one worker, not of all of them. Take mode=Async, or num_workers=1"
            )
        factor = options.device_iterations * options.replication_factor * options.Training.gradient_accumulation
        self._combined = None if batch_size is None else batch_size * factor
        if batch_size is None and factor > 1:
            raise ValueError(f"batch_size=None makes no batches, and one call of this model needs {factor} of them")
        processes = options.Distributed.numProcesses
        sampler = kwargs.pop("sampler", None)
        has_batch_sampler = kwargs.get("batch_sampler") is not None
        is_whole = has_batch_sampler or sampler is not None or isinstance(dataset, IterableDataset)
        if auto_distributed_partitioning:
            if is_whole and processes > 1 and not isinstance(sampler, DistributedSampler):
                raise ValueError(
                    f"{processes} processes cannot divide an IterableDataset, which has no length, or the samples of a "
                    f"sampler: let it give each process its part by itself, and say auto_distributed_partitioning=False"
                )
            if not is_whole and (processes > 1 or (shuffle and options.random_seed is not None)):
                sampler = self._part(cast(Any, dataset), bool(shuffle), drop_last)
                shuffle = None
        super().__init__(
            dataset,
            batch_size=(batch_size or 1) if has_batch_sampler else self._combined,
            shuffle=shuffle,
            sampler=sampler,
            num_workers=num_workers,
            drop_last=False if has_batch_sampler or self._combined is None else drop_last,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            **kwargs,
        )

    def _part(self, dataset: Sized, shuffle: bool, drop_last: bool) -> _PartSampler:
        distributed, combined = self._options.Distributed, self._combined or 1
        if shuffle and self._options.random_seed is None:
            raise ValueError(
                f"shuffle=True with {distributed.numProcesses} processes needs the same order on all of them, else "
                f"some samples are seen twice and others never: set options.randomSeed(42), the same on every instance"
            )
        part = _PartSampler(
            len(dataset), distributed.processId, distributed.numProcesses, combined,
            self._options.random_seed if shuffle else None, drop_last,
        )  # fmt: skip
        if not len(part):
            raise ValueError(
                f"a data set of {len(dataset)} has no whole batch for each process: one call takes {combined} samples "
                f"on each of {distributed.numProcesses} processes"
            )
        return part

    @property
    def combinedBatchSize(self) -> int | None:
        """Number of samples per call."""
        return self._combined

    @property
    def options(self) -> Options:
        """The options of the data loader."""
        return self._options

    def terminate(self) -> None:
        """End the processes that load data."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


class AsynchronousDataAccessor(_Terminated):
    """Stand-in for a process that loads ahead; here the data loader's own workers do this.

    Args:
        dataset: a data loader.
        rebatched_size: must be None: batches are those of the data loader.
        **options: accepted, without effect.
    """

    def __init__(self, dataset: Any, *, rebatched_size: int | None = None, **options: Any) -> None:
        if rebatched_size is not None:
            raise NotImplementedError(f"rebatched_size={rebatched_size} is not imitated: batch in poptorch.DataLoader")
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def terminate(self) -> None:
        """End the processes that load data."""
        if hasattr(self._dataset, "terminate"):
            self._dataset.terminate()
