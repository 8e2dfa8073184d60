"""Old import path of elastic jobs."""

from __future__ import annotations

from horovod.ray.elastic import ElasticAdapter, RayHostDiscovery

__all__ = ["ElasticAdapter", "RayHostDiscovery"]
