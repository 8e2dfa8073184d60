"""Pass the division of the job to PopART's session options and device manager."""

from __future__ import annotations

from typing import Any

from popdist.environment import division, getDeviceId

__all__ = ["configureSessionOptions", "getDevice"]


def configureSessionOptions(opts: Any) -> Any:
    """Set the number and the global indices of this instance's replicas in ``SessionOptions``.

    Args:
        opts: the ``popart.SessionOptions``; it is changed.

    Returns:
        ``opts``.
    """
    found = division()
    opts.enableReplicatedGraphs = found.local > 1
    opts.replicatedGraphCount = found.local
    opts.enableDistributedReplicatedGraphs = found.total > found.local
    opts.globalReplicaOffset = found.offset
    opts.globalReplicationFactor = found.total
    return opts


def getDevice(ipus_per_replica: int | None = None, connectionType: Any = None) -> Any:
    """Return a device for the replicas of this instance.

    Args:
        ipus_per_replica: number of devices per replica; the job's number when omitted.
        connectionType: time of the attachment; immediately when omitted.

    Raises:
        RuntimeError: the job was started with another number of devices per replica.
    """
    import popart

    ipus = division().ipus_per_replica if ipus_per_replica is None else ipus_per_replica
    getDeviceId(ipus)
    count = ipus * division().local
    manager: Any = getattr(popart, "DeviceManager")()  # noqa: B009 - of the SDK or of its imitation
    if connectionType is None:
        return manager.acquireAvailableDevice(count)
    return manager.acquireAvailableDevice(count, connectionType=connectionType)
