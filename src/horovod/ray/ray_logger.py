"""Send dictionaries from a rank's function to the callbacks of ``RayExecutor.run`` during training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from horovod.logs import logger
from horovod.ray.nodes import on_this_node

__all__ = ["configure", "log", "relayed"]

_queue: Any = None


def configure(queue: Any) -> None:
    """Set the queue to which ``log`` of this process sends dictionaries.

    Args:
        queue: a ``ray.util.queue.Queue``; None drops the dictionaries.
    """
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Send a dictionary to each callback; without callbacks it is dropped.

    Args:
        info_dict: plain data, such as numbers.
    """
    if _queue is not None:
        _queue.put(info_dict)


@contextlib.contextmanager
def relayed(callbacks: Sequence[Callable[[dict[str, Any]], Any]]) -> Iterator[Any]:
    """Return a context that calls functions with logged dictionaries, and yields the queue for the ranks, or None.

    Args:
        callbacks: functions called with each dictionary, in a thread of this process.

    Raises:
        Exception: as a callback raised it, at the end of the context.
    """
    if not callbacks:
        yield None
        return
    from ray.util.queue import Queue

    queue, errors = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": on_this_node()}), list[Exception]()

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
