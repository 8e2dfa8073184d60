"""Executors under Ray Client, whose process is not part of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

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
        self._actor = ray.remote(kind).options(num_cpus=0).remote(*options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: ray.get(getattr(self._actor, name).remote(*args))

    def shutdown(self) -> None:
        """End the workers, then the actor."""
        ray.get(self._actor.shutdown.remote())
        ray.kill(self._actor)
