"""The division of a job into instances and replicas, from the environment that ``poprun`` sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "Division", "checkNumIpusPerReplica", "division", "getDeviceId", "getInstanceIndex", "getLocalInstanceIndex",
    "getNumInstances", "getNumIpusPerReplica", "getNumLocalReplicas", "getNumTotalReplicas", "getReplicaIndexOffset",
    "isPopdistEnvSet",
]  # fmt: skip

TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"
IPUS = "POPDIST_NUM_IPUS_PER_REPLICA"
UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"


@dataclass(frozen=True)
class Division:
    """The part of a job that one instance has.

    Attributes:
        is_set: whether a launcher has set the division; otherwise the job is one instance with one replica.
        total: number of replicas of the job.
        local: number of replicas of this instance.
        offset: global index of this instance's first replica.
        local_instance: index of this instance on its host.
        ipus_per_replica: number of devices per replica.
        is_uniform: whether all instances have the same number of replicas.
    """

    is_set: bool
    total: int
    local: int
    offset: int
    local_instance: int
    ipus_per_replica: int
    is_uniform: bool


def division(environ: Mapping[str, str] | None = None) -> Division:
    """Read the division.

    Args:
        environ: variables to read; the environment of this process when omitted.

    Raises:
        RuntimeError: a variable is not a number, or variables contradict each other.
    """
    found = os.environ if environ is None else environ
    total, local = _number(found, TOTAL, 1, 1), _number(found, LOCAL, 1, 1)
    offset = _number(found, OFFSET, 0, 0)
    is_uniform = _number(found, UNIFORM, 1, 0) != 0
    if offset + local > total:
        raise RuntimeError(
            f"{OFFSET}={offset} and {LOCAL}={local} are more than {TOTAL}={total}; poprun sets all three"
        )
    if is_uniform and (total % local or offset % local):
        raise RuntimeError(
            f"{TOTAL}={total} and {OFFSET}={offset} are not multiples of {LOCAL}={local}: instances that differ need "
            f"{UNIFORM}=0"
        )
    return Division(
        TOTAL in found, total, local, offset, _number(found, LOCAL_INSTANCE, 0, 0), _number(found, IPUS, 1, 1),
        is_uniform,
    )  # fmt: skip


def _number(environ: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise RuntimeError(f"{name} must be a whole number of at least {least}; received {text!r}")
    return number


def isPopdistEnvSet() -> bool:
    """Return whether ``poprun`` started this process."""
    return division().is_set


def getNumTotalReplicas() -> int:
    """Return the number of replicas of the job."""
    return division().total


def getNumLocalReplicas() -> int:
    """Return the number of replicas of this instance."""
    return division().local


def getReplicaIndexOffset() -> int:
    """Return the global index of this instance's first replica."""
    return division().offset


def getNumInstances() -> int:
    """Return the number of instances of the job.

    Raises:
        RuntimeError: the instances have different numbers of replicas.
    """
    found = _uniform("getNumInstances")
    return found.total // found.local


def getInstanceIndex() -> int:
    """Return the index of this instance in the job.

    Raises:
        RuntimeError: the instances have different numbers of replicas.
    """
    found = _uniform("getInstanceIndex")
    return found.offset // found.local


def _uniform(function: str) -> Division:
    found = division()
    if not found.is_uniform:
        raise RuntimeError(
            f"popdist.{function}() needs the same number of replicas on every instance. Received: {UNIFORM}=0"
        )
    return found


def getLocalInstanceIndex() -> int:
    """Return the index of this instance among those of its host."""
    return division().local_instance


def getNumIpusPerReplica() -> int:
    """Return the number of devices per replica."""
    return division().ipus_per_replica


def checkNumIpusPerReplica(numIpus: int) -> bool:
    """Return whether a replica has this number of devices.

    Args:
        numIpus: number of devices that the program needs.
    """
    return division().ipus_per_replica == numIpus


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the number of this instance's device: the software has one device for each instance of a host.

    Args:
        ipusPerReplica: number of devices per replica; 0 for the job's number.

    Raises:
        RuntimeError: the number differs from the job's.
    """
    found = division()
    if ipusPerReplica and found.is_set and ipusPerReplica != found.ipus_per_replica:
        raise RuntimeError(
            f"ipus_per_replica={ipusPerReplica}: this job has {found.ipus_per_replica} IPUs per replica; start it with "
            f"poprun --ipus-per-replica={ipusPerReplica}"
        )
    return found.local_instance
