"""Placement of workers: placement groups, and options of the actors in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import ray
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.ray.settings import Resources

__all__ = ["Placement", "create_placement_group", "place_on_hosts", "place_packed", "worker_options"]


class Placement(NamedTuple):
    """A placement group for workers."""

    group: Any
    bundles: list[int]  # index of the bundle of each worker; -1 for any bundle
    is_ours: bool  # whether to remove the group at the end

    def remove(self) -> None:
        """Release the resources, if this job has reserved them."""
        if self.is_ours:
            remove_placement_group(self.group)


def create_placement_group(
    resources_per_bundle: dict[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> Any:
    """Reserve bundles of resources.

    Args:
        resources_per_bundle: amounts of resources by name.
        num_bundles: number of equal bundles.
        pg_timeout: seconds to wait for the cluster.
        pg_strategy: Ray's name of the strategy: "PACK", "STRICT_SPREAD" and so on.

    Raises:
        TimeoutError: the cluster did not have them in time; the message lists free resources.

    Blocks until the resources are reserved.
    """
    group = placement_group([resources_per_bundle] * num_bundles, strategy=pg_strategy)
    ready, _ = ray.wait([group.ready()], timeout=pg_timeout)
    if not ready:
        remove_placement_group(group)
        free = {name: n for name, n in ray.available_resources().items() if name in resources_per_bundle}
        where = ", each on a node of its own" if pg_strategy == "STRICT_SPREAD" else ""
        raise TimeoutError(
            f"Ray could not reserve {num_bundles} x {resources_per_bundle}{where} within {pg_timeout:g} s "
            f"(placement_group_timeout_s)\nfree now: {free}, on {len(ray.nodes())} nodes; ask for less, add nodes, or "
            f"call shutdown() of executors that are not used any more"
        )
    return group


def place_packed(resources: Resources, count: int, timeout_s: float, use_current: bool) -> Placement:
    """Place workers on as few nodes as possible, or inside the caller's placement group.

    Args:
        resources: resources of one worker.
        count: number of workers.
        timeout_s: seconds to wait for the reservation.
        use_current: whether the caller's group is used, if it has one.
    """
    current = get_current_placement_group() if use_current else None
    if current is not None:
        return Placement(current, [-1] * count, False)
    bundle = resources.bundle() or {"CPU": 0.001}
    return Placement(create_placement_group(bundle, count, timeout_s, "PACK"), list(range(count)), True)


def place_on_hosts(resources: Resources, hosts: int, per_host: int, timeout_s: float) -> Placement:
    """Place the same number of workers on each of several nodes.

    Args:
        resources: resources of one worker.
        hosts: number of nodes.
        per_host: number of workers on each node.
        timeout_s: seconds to wait for the reservation.
    """
    bundle = resources.bundle(per_host) or {"CPU": 0.001}
    group = create_placement_group(bundle, hosts, timeout_s, "STRICT_SPREAD")
    return Placement(group, [host for host in range(hosts) for _ in range(per_host)], True)


def worker_options(resources: Resources, group: Any, bundle: int) -> dict[str, Any]:
    """Return the options of an actor in a bundle.

    Args:
        resources: resources of one worker.
        group: the placement group.
        bundle: index of its bundle.
    """
    return {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
    }
