"""Ranks on a Ray cluster: ``RayExecutor`` and ``ElasticRayExecutor``; ``horovod.ray.train`` for Ray Train."""

from horovod.bindings.misuse import not_installed

try:
    import ray as _ray  # noqa: F401 - Ray's own package, not horovod.ray
except ModuleNotFoundError as error:
    raise not_installed(error, "ray", "ray") from None

from horovod.ray import ray_logger
from horovod.ray.elastic import ElasticRayExecutor, RayHostDiscovery
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "ray_logger"]
