"""Old import path of elastic jobs."""

from horovod.ray.elastic import ElasticAdapter, RayHostDiscovery

__all__ = ["ElasticAdapter", "RayHostDiscovery"]
