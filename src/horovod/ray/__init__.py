"""Ranks on a Ray cluster: ``RayExecutor`` and ``ElasticRayExecutor``; ``horovod.ray.train`` for Ray Train."""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401 - Ray's own package, not horovod.ray
except ImportError as error:
    raise ImportError("horovod.ray needs Ray: pip install khorovod[ray]", name=error.name) from error

from horovod.ray import ray_logger
from horovod.ray.elastic import ElasticRayExecutor, RayHostDiscovery
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "ray_logger"]
