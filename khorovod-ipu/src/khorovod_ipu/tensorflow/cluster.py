"""The workers from ``TF_CONFIG`` or a cluster resolver, checked with precise errors."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod import config

__all__ = ["Cluster", "ClusterError", "read", "settings"]

_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
#: Default seconds that workers wait for each other: a person starts them in one terminal after the
#: other, and they load TensorFlow first.
_BY_HAND = "300"
#: Jobs whose tasks train; a chief comes before the workers.
_TRAINING = ("chief", "worker")
#: Names of one and the same host.
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class ClusterError(ValueError):
    """TF_CONFIG or the cluster resolver is wrong."""


@dataclass(frozen=True)
class Cluster:
    """The workers of a job, and the rank of this process.

    Attributes:
        tasks: job and index of every worker; the first is the chief.
        addresses: host and port of each worker.
        rank: rank of this process.
        protocol: protocol of TensorFlow's servers.
    """

    tasks: tuple[tuple[str, int], ...]
    addresses: tuple[str, ...]
    rank: int
    protocol: str = "grpc"

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.tasks)

    @property
    def jobs(self) -> dict[str, list[str]]:
        """Addresses by job, in the format of TensorFlow's ClusterSpec."""
        jobs: dict[str, list[str]] = {}
        for (job, _), address in zip(self.tasks, self.addresses, strict=True):
            jobs.setdefault(job, []).append(address)
        return jobs

    def device(self, rank: int, kind: str = "") -> str:
        """Return TensorFlow's name of a worker or of its device.

        Args:
            rank: rank of the worker.
            kind: suffix of the device, such as ``/device:CPU:0``.
        """
        job, index = self.tasks[rank]
        return f"/job:{job}/replica:0/task:{index}{kind}"

    def describe(self, rank: int) -> str:
        """Return a worker's description for errors."""
        job, index = self.tasks[rank]
        return f"/job:{job}/task:{index} at {self.addresses[rank]}"


def settings() -> config.Config:
    """Return the settings of a job that a person starts."""
    return config.load({"HOROVOD_START_TIMEOUT": _BY_HAND, **os.environ})


def read(resolver: Any) -> Cluster:
    """Return the cluster that a resolver describes.

    Args:
        resolver: one of ``tf.distribute.cluster_resolver``; for TFConfigClusterResolver the variable itself is checked.

    Raises:
        ClusterError: the cluster is invalid; the message names the received and the expected value.
    """
    source = type(resolver).__name__
    if source == "TFConfigClusterResolver":
        source = "TF_CONFIG"
        check_variable(os.environ.get("TF_CONFIG"))
    jobs = resolver.cluster_spec().as_dict()
    given = {job: addresses for job, addresses in jobs.items() if job in _TRAINING}
    tasks = [(job, index) for job in _TRAINING for index in range(len(given.get(job, ())))]
    addresses = [given[job][index] for job, index in tasks]
    if not tasks:
        raise ClusterError(f"{source} names no worker: its jobs are {sorted(jobs) or 'none'}. Expected: {_EXAMPLE}")
    mine = (resolver.task_type, resolver.task_id)
    if mine[0] is None or mine[1] is None:
        raise ClusterError(
            f"{source} does not say which task this process is: type {mine[0]!r}, index {mine[1]!r}. Give "
            'task_type and task_id, in TF_CONFIG "task"'
        )
    if mine not in tasks:
        raise ClusterError(_no_such_task(source, mine[0], mine[1], jobs))
    _check_addresses(source, addresses)
    return Cluster(tuple(tasks), tuple(addresses), tasks.index(mine), resolver.rpc_layer or "grpc")


def check_variable(text: str | None) -> None:
    """Raise what is wrong with the text of TF_CONFIG, if anything is.

    Raises:
        ClusterError: with the place and what is expected.
    """
    if not text:
        raise ClusterError(f"TF_CONFIG is not set. Every worker needs it, with its own index. Example: {_EXAMPLE}")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON: {error.msg} at character {error.pos}, near {text[max(0, error.pos - 12) :][:30]!r}"
            f". Expected: {_EXAMPLE}"
        ) from None
    if not isinstance(value, Mapping):
        raise ClusterError(f"TF_CONFIG must be an object of JSON. Received: {text[:80]}. Expected: {_EXAMPLE}")
    cluster = value.get("cluster")
    if not isinstance(cluster, Mapping) or not cluster:
        raise ClusterError(f'TF_CONFIG has no "cluster" that names jobs and their addresses. Expected: {_EXAMPLE}')
    for job, addresses in cluster.items():
        if not isinstance(addresses, (list, Mapping)):
            raise ClusterError(f'TF_CONFIG: the addresses of "{job}" must be a list. Received: {addresses!r}')
        for address in addresses.values() if isinstance(addresses, Mapping) else addresses:
            if not isinstance(address, str):
                raise ClusterError(f'TF_CONFIG: an address of "{job}" must be text, host:port. Received: {address!r}')
    if not any(cluster.get(job) for job in _TRAINING):
        raise ClusterError(f"TF_CONFIG names no worker: its jobs are {sorted(cluster)}. Expected: {_EXAMPLE}")
    _check_task(value.get("task"), cluster)


def _check_task(task: Any, cluster: Mapping[str, Any]) -> None:
    if not isinstance(task, Mapping):
        raise ClusterError(
            'TF_CONFIG has no "task": it must say which of the workers this process is, for example '
            '"task": {"type": "worker", "index": 0}'
        )
    missing = [name for name in ("type", "index") if name not in task]
    if missing:
        raise ClusterError(f'TF_CONFIG: "task" lacks "{missing[0]}". Received: {json.dumps(dict(task))}')
    index = task["index"]
    if isinstance(index, str) and index.isdigit():
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool):
        raise ClusterError(f'TF_CONFIG: the "index" of "task" must be a number. Received: {task["index"]!r}')
    job = task["type"]
    if job in _TRAINING and not 0 <= index < len(cluster.get(job, ())):
        raise ClusterError(_no_such_task("TF_CONFIG", job, index, cluster))


def _no_such_task(source: str, job: str, index: int, jobs: Mapping[str, Any]) -> str:
    if job not in jobs:
        return f"{source}: this process is said to be a {job!r}, but the jobs of the cluster are {sorted(jobs)}"
    if job not in _TRAINING:
        return f"{source}: a {job!r} does not train; this process must be one of {list(_TRAINING)}"
    count = len(jobs[job])
    return (
        f"{source}: index {index} is out of range, the cluster has {count} of {job!r}: {', '.join(jobs[job])}. "
        f"Indices go from 0 to {count - 1}"
    )


def _check_addresses(source: str, addresses: list[str]) -> None:
    for address in addresses:
        host, colon, port = str(address).rpartition(":")
        if not colon or not host.strip() or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ClusterError(f"{source}: an address must be host:port. Received: {address!r}")
    seen: dict[tuple[str, int], str] = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        place = ("localhost" if host in _LOOPBACK else host.lower(), int(port))
        if place in seen:
            names = " and ".join(dict.fromkeys((seen[place], address)))
            raise ClusterError(f"{source}: {names} is the address of two workers; every worker needs its own")
        seen[place] = address


def fail_fast() -> None:
    """Make TensorFlow's calls to a lost worker fail, instead of waiting for its return."""
    os.environ.setdefault("GRPC_FAIL_FAST", "true")


def check_port(cluster: Cluster) -> bool:
    """Return whether this process already listens on this worker's port.

    Raises:
        ClusterError: another process listens on the port.
    """
    address = cluster.addresses[cluster.rank]
    port = int(address.rpartition(":")[2])
    with closing(socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return False
        except OSError:
            if _is_ours(port):
                return True
    raise ClusterError(
        f"port {port} of {cluster.describe(cluster.rank)}, which is this worker, is in use by another process. Is a "
        "worker with the same index in TF_CONFIG running, or one of an earlier job?"
    )


def _is_ours(port: int) -> bool:
    """Return whether this process listens on a port: a script may start its server before the strategy."""
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        fields = [row.split() for row in rows]
        listening |= {f"socket:[{f[9]}]" for f in fields if f[3] == "0A" and int(f[1].rpartition(":")[2], 16) == port}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if str(descriptor.readlink()) in listening:
                return True
        except OSError:
            continue
    return False
