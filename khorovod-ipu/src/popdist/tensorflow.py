"""Pass the division of the job to the configuration of TensorFlow for IPUs."""

from __future__ import annotations

from typing import Any

from popdist.environment import getDeviceId, getInstanceIndex, getNumInstances

__all__ = ["set_ipu_config"]


def set_ipu_config(config: Any, ipus_per_replica: int | None = None, configure_device: bool = True) -> Any:
    """Set this instance's device and its part of the job in an ``IPUConfig``.

    Args:
        config: the ``IPUConfig``; it is changed.
        ipus_per_replica: number of devices per replica; the job's number when omitted.
        configure_device: whether to choose the device, too.

    Returns:
        ``config``.

    Raises:
        RuntimeError: the job was started with another number of devices per replica.
    """
    device = getDeviceId(ipus_per_replica or 0)
    if configure_device:
        config.select_ipus = device
    config.experimental.multi_replica_distribution.process_count = getNumInstances()
    config.experimental.multi_replica_distribution.process_index = getInstanceIndex()
    return config
