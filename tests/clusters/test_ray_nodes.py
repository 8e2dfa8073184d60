"""Nodes of a Ray cluster that are lost, and resources that a job has given back."""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import rays

ray = pytest.importorskip("ray", reason="needs: pip install khorovod[ray]")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

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


def _size() -> int:
    import horovod.numpy as hvd

    hvd.init()
    hvd.elastic.run(lambda state: hvd.barrier())(hvd.elastic.NumpyState(batch=0))
    return hvd.size()


def test_an_elastic_job_begins_with_the_resources_of_one_that_has_just_ended(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from horovod.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(), min_workers=2, max_workers=2, cpus_per_worker=0.5)
    executor.start()
    for _ in range(2):
        assert executor.run(_size) == [2, 2]
    assert "room" not in capsys.readouterr().err
