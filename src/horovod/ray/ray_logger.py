"""Lets the function of a rank send dictionaries to the callbacks of ``RayExecutor.run``, while it trains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from horovod.logs import logger

__all__ = ["configure", "log", "relayed"]

_queue: Any = None


def configure(queue: Any) -> None:
    """Say where ``log`` of this process puts what it gets.

    Args:
        queue: a ``ray.util.queue.Queue``; None for nowhere.
    """
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Send a dictionary to the callbacks, one call of each for each dictionary; without callbacks it is dropped.

    Args:
        info_dict: plain data, such as numbers.
    """
    if _queue is not None:
        _queue.put(info_dict)


@contextlib.contextmanager
def relayed(callbacks: Sequence[Callable[[dict[str, Any]], Any]]) -> Iterator[Any]:
    """Call functions with what ranks log inside of the context; gives the queue for the ranks, or None.

    Args:
        callbacks: each is called with each dictionary, in a thread of this process.

    Raises:
        Exception: as a callback raised it, at the end of the context.
    """
    if not callbacks:
        yield None
        return
    from ray.util.queue import Queue

    queue, errors = Queue(actor_options={"num_cpus": 0}), list[Exception]()

    def relay() -> None:
        while (found := queue.get()) is not None:
            try:
                for callback in callbacks if not errors else ():
                    callback(found)
            except Exception as error:
                logger.exception("a callback failed; the callbacks are not called any more")
                errors.append(error)

    thread = threading.Thread(target=relay, name="horovod-ray-callbacks", daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        queue.put(None)
        thread.join()
        queue.shutdown(force=True)
    if errors:
        raise errors[0]
