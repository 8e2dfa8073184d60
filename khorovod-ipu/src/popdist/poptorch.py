"""``popdist.poptorch.Options``: PopTorch's options with the division of ``poprun``."""

from __future__ import annotations

from typing import Any, NoReturn

import poptorch
from popdist.environment import division, getDeviceId, getInstanceIndex, getNumInstances
from poptorch.options import DistributedOptions

__all__ = ["Options"]


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"Cannot call `{name}` with popdist.poptorch.Options: poprun has decided it; say it on its command line, or "
        f"take poptorch.Options"
    )


class _Distributed(DistributedOptions):
    """``Options.Distributed`` with the fixed values of the job."""

    def __init__(self) -> None:
        super().__init__()
        super().configureProcessId(getInstanceIndex(), getNumInstances())
        self._is_decided = True

    def disable(self) -> NoReturn:
        """Refuse to leave the job."""
        _refuse("Distributed.disable")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> DistributedOptions:
        """Refuse other names."""
        if getattr(self, "_is_decided", False):
            _refuse("Distributed.setEnvVarNames")
        return super().configureProcessId(0, 1)

    def configureProcessId(self, process_id: int, num_processes: int) -> NoReturn:
        """Refuse another place in the job."""
        _refuse("Distributed.configureProcessId")


class Options(poptorch.Options):
    """Options with the replicas of this instance, and its place in the job; both are fixed.

    Args:
        ipus_per_replica: number of devices per replica; the job's number when omitted.

    Raises:
        RuntimeError: the job was started with another number of devices per replica.
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        found = division()
        getDeviceId(ipus_per_replica or 0)  # refuses a number that is not the job's
        super().__init__()
        self.Distributed = _Distributed()
        super().replicationFactor(found.local)
        self._values["ipus_per_replica"] = ipus_per_replica or found.ipus_per_replica

    def useIpuId(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse another device."""
        _refuse("useIpuId")

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """Refuse another number of replicas."""
        _refuse("replicationFactor")
