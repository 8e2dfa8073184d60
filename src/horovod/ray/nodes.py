"""The nodes of the Ray cluster: their names in a job, and their slots for elastic jobs."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod.ray.settings import Resources, check_gpus

__all__ = ["RayHostDiscovery", "alive_nodes", "free_slots", "node_name", "on_this_node", "wait_for_releases"]

#: Maximum seconds to wait for resources to be released, and between two looks.
_RELEASE_S, _RELEASE_LOOK_S = 2.0, 0.02


def alive_nodes() -> dict[str, dict[str, Any]]:
    """Return Ray's description of each living node, by its id."""
    return {node["NodeID"]: node for node in ray.nodes() if node.get("Alive", node.get("alive"))}


def node_name(node_id: str, address: str) -> str:
    """Return the name of a node in messages, and in HOROVOD_HOSTNAME; several nodes may share an address.

    Args:
        node_id: id of the node.
        address: address of its host.
    """
    return f"{address}-{node_id[:6]}"


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Return the strategy that places an actor on the node of this process, so that no other node takes it away.

    Under Ray Client this is the node of the client's server.
    """
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


class RayHostDiscovery:
    """Finds the number of workers for which each node of the cluster has resources.

    Args:
        use_gpu: whether each worker has GPUs.
        cpus_per_worker: CPUs of each worker.
        gpus_per_worker: GPUs of each worker; 1 when omitted, if ``use_gpu``.
        cpus_per_slot: older name of ``cpus_per_worker``.
        gpus_per_slot: older name of ``gpus_per_worker``.

    Raises:
        ValueError: arguments contradict each other.
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: int | None = None,
        cpus_per_slot: float | None = None,
        gpus_per_slot: int | None = None,
    ) -> None:
        gpus = check_gpus(use_gpu, gpus_per_worker if gpus_per_slot is None else gpus_per_slot, "gpus_per_worker")
        self.resources = Resources(cpus_per_worker if cpus_per_slot is None else cpus_per_slot, gpus)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the maximum number of workers on each living node, by the id of the node."""
        found = {id_: self.resources.slots(node["Resources"]) for id_, node in alive_nodes().items()}
        return {id_: slots for id_, slots in found.items() if slots > 0}


def wait_for_releases() -> None:
    """Wait until Ray lists the resources of removed placement groups as free, which takes it about 0.1 s."""
    removed = {id_ for id_, group in ray.util.placement_group_table().items() if group["state"] == "REMOVED"}
    deadline = time.monotonic() + _RELEASE_S
    while time.monotonic() < deadline:
        names = {name for free in available_resources_per_node().values() for name in free}
        if not any(name.rpartition("_")[2] in removed for name in names):  # a group's resources end with its id
            return
        time.sleep(_RELEASE_LOOK_S)


def free_slots(resources: Resources) -> dict[str, int]:
    """Return the number of workers that could start now on each node, with its free resources, by the id of the node.

    Args:
        resources: resources of one worker.
    """
    return {id_: resources.slots(found) for id_, found in available_resources_per_node().items()}
