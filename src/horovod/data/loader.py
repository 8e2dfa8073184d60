"""A loader's skeleton, and a mixin that runs it in a thread.

To read shards of a data set, say::

    class ShardLoader(BaseDataLoader): ...
    class AsyncShardLoader(AsyncDataLoaderMixin, ShardLoader): ...

    loader = AsyncShardLoader(async_loader_queue_size=8, ...)
    for batch in loader: ...
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from horovod.errors import HorovodInternalError

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


class BaseDataLoader:
    """Base of loaders: a subclass defines the number of batches, and the iteration over them."""

    def __len__(self) -> int:
        """Return the number of batches of one epoch."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch for the consumer, made from ``batch``; runs in the consumer's thread."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    """Marks the end of an epoch, after its last batch."""


class _Epoch:
    """One pass over the data: a thread that prepares batches, and methods that take them."""

    def __init__(self, batches: Iterator[Any], ahead: int) -> None:
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._stopped = False
        self._thread = threading.Thread(target=self._prepare, args=(batches,), name="horovod-loader", daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """Return the next batch, or at the end the mark of the end or of a failure."""
        batch = self._ready.get()
        self._room.release()
        return batch

    def close(self) -> None:
        """End the thread; waits for the batch in preparation."""
        self._stopped = True
        self._room.release()
        self._thread.join()
        self._ready.put(_Failure(HorovodInternalError("the data loader was closed while a loop ran over it")))

    def _prepare(self, batches: Iterator[Any]) -> None:
        last: Any = _End()
        try:
            for batch in batches:
                self._room.acquire()
                if self._stopped:
                    return
                self._ready.put(batch)
        except BaseException as error:
            last = _Failure(error)
        self._ready.put(last)


class AsyncDataLoaderMixin:
    """Makes a ``BaseDataLoader`` prepare batches in a thread, a limited number of them ahead.

    Put it before the loader's class. Each epoch has its own thread, which ends with the epoch, with
    ``close_async_loader()``, or when the caller leaves the loop over it early. The loop raises errors of
    the loader.

    Args:
        async_loader_queue_size: number of batches to prepare ahead; 0 does the work in the caller's thread.
        debug_data_loader: print when an epoch's thread starts and ends.
        args: arguments of the loader's own class.
        kwargs: named arguments of the loader's own class.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(f"async_loader_queue_size must be 0 or more. Received: {async_loader_queue_size}")
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._epochs: set[_Epoch] = set()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the threads; a loop that still runs over this loader raises an error."""
        while self._epochs:
            self._epochs.pop().close()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch."""
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        epoch = _Epoch(self._iterate(), self.async_loader_queue_size)  # type: ignore[attr-defined]
        self._epochs.add(epoch)
        self._say("starts")
        try:
            while not isinstance(batch := epoch.take(), _End):
                if isinstance(batch, _Failure):
                    raise batch.error
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            if epoch in self._epochs:
                self._epochs.discard(epoch)
                epoch.close()
            self._say("ends")

    def _say(self, what: str) -> None:
        if self.debug_data_loader:
            print(f"{type(self).__name__}: the thread that prepares batches {what}", flush=True)
