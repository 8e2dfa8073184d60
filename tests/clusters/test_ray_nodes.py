"""Actors of ``horovod.ray`` beside the ranks stay when other nodes are lost."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import pytest
import rays

ray = pytest.importorskip("ray", reason="needs: pip install khorovod[ray]")

no_leaks, pytestmark = rays.no_leaks, rays.MARKS
_QUEUES = 8  # Ray would place each of them on either node


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_callbacks_hear_the_ranks_after_the_loss_of_a_node(cluster: Any) -> None:
    from horovod.ray import ray_logger

    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    heard: queue.Queue[dict[str, int]] = queue.Queue()
    with contextlib.ExitStack() as stack:
        queues = [stack.enter_context(ray_logger.relayed([heard.put])) for _ in range(_QUEUES)]
        for number, each in enumerate(queues):
            each.put({"before": number})
        assert [heard.get(timeout=100).keys() for _ in queues] == [{"before"}] * _QUEUES
        cluster.remove_node(node, allow_graceful=False)
        for number, each in enumerate(queues):
            each.put({"after": number})
        assert sorted(heard.get(timeout=100)["after"] for _ in queues) == list(range(_QUEUES))
