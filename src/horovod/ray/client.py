"""Executors under Ray Client, whose process is not part of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from horovod.errors import LaunchError
from horovod.ray.nodes import on_this_node

__all__ = ["in_cluster"]


def in_cluster(kind: type[Any], options: tuple[Any, ...]) -> Any:
    """Return an adapter in this process, or under Ray Client a stand-in for one in an actor.

    Args:
        kind: class of the adapter.
        options: its arguments.
    """
    from ray.util.client import ray as client

    return _Remote(kind, options) if client.is_connected() else kind(*options)


class _Remote:
    """Runs an adapter in an actor, so that the job service and references stay in the cluster.

    Args:
        kind: class of the adapter.
        options: its arguments.
    """

    def __init__(self, kind: type[Any], options: tuple[Any, ...]) -> None:
        # Two calls at a time: the second one is shutdown(), during another one.
        own = {"num_cpus": 0, "max_concurrency": 2, "scheduling_strategy": on_this_node()}
        self._actor: Any = ray.remote(kind).options(**own).remote(*options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._actor is None:
                raise LaunchError("Ctrl-C in a call has ended the workers: call shutdown(), then start()")
            try:
                return ray.get(getattr(self._actor, name).remote(*args))
            except (KeyboardInterrupt, SystemExit):
                self.shutdown()  # nothing else ends the call
                raise

        return call

    def shutdown(self) -> None:
        """End the workers, then the actor."""
        if self._actor is not None:
            ray.get(self._actor.shutdown.remote())
            ray.kill(self._actor)
            self._actor = None
