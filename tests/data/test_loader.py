"""Loaders that work ahead in a thread: same batches, no thread left, errors arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.errors import HorovodInternalError


class Numbers(BaseDataLoader):
    def __init__(self, count: int, fail_at: int | None = None) -> None:
        self.count = count
        self.fail_at = fail_at
        self.made: list[int] = []
        self.made_enough = threading.Event()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[Any]:
        for number in range(self.count):
            if number == self.fail_at:
                raise KeyError(f"shard {number}")
            self.made.append(number)
            if len(self.made) >= 3:
                self.made_enough.set()
            yield number

    def _process_batch(self, batch: Any) -> Any:
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("queue_size", [0, 1, 2, 64])
def test_gives_every_batch_in_order_each_epoch(queue_size: int) -> None:
    loader = AsyncNumbers(queue_size, False, 5)
    assert [list(loader), list(loader)] == [[0, 10, 20, 30, 40]] * 2
    assert len(loader) == 5


def test_works_ahead_of_the_loop() -> None:
    loader = AsyncNumbers(async_loader_queue_size=2, count=10)
    batches = iter(loader)
    assert next(batches) == 0
    assert loader.made_enough.wait(timeout=300)
    batches.close()


def test_an_error_of_the_loader_is_raised_in_the_loop() -> None:
    seen = []
    with pytest.raises(KeyError, match="shard 2"):
        for batch in AsyncNumbers(count=5, fail_at=2):
            seen.append(batch)
    assert seen == [0, 10]


def test_leaving_the_loop_early_ends_the_thread() -> None:
    loader = AsyncNumbers(async_loader_queue_size=1, count=1000)
    batches = iter(loader)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "horovod-loader"]


def test_closing_ends_the_thread_and_the_loop() -> None:
    loader = AsyncNumbers(async_loader_queue_size=1, count=1000)
    batches = iter(loader)
    next(batches)
    loader.close_async_loader()
    assert not [thread for thread in threading.enumerate() if thread.name == "horovod-loader"]
    with pytest.raises(HorovodInternalError, match="closed"):
        list(batches)


def test_a_negative_queue_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        AsyncNumbers(-1, False, 5)


def test_horovods_import_path_still_works() -> None:
    from horovod.data import data_loader_base

    assert data_loader_base.AsyncDataLoaderMixin is AsyncDataLoaderMixin
