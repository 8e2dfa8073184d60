"""Whether the network between hosts is as fast as what the hosts do themselves.

If it is not, rounds are small, so that it is idle neither before the first nor after the last; if it is, large ones
cost less, in the arena and outside of it. All members must cut a tensor alike, so they agree on it: after a few calls,
and again now and then.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from horovod.transports.groups import Group
from horovod.transports.hierarchical.stage import Stage

__all__ = ["Rate"]

_LARGE_BYTES = 16 << 20
#: Before, connections are made and memory is used for the first time; and after how many calls to ask again.
_WARM_CALLS, _AGAIN_CALLS = 3, 256
#: Bytes of one rank per nanosecond, all included.
_HIGH = 0.4


class _Team(Protocol):
    stage: Stage
    hosts: tuple[tuple[int, ...], ...]
    slots: int
    is_owner: bool

    def owners(self) -> Group:
        """See ``Team``."""


class Rate:
    """See the module; all members note the same calls.

    Attributes:
        is_high: whether the network is fast.
    """

    def __init__(self) -> None:
        self.is_high = False
        self._calls = 0

    def is_due(self, nbytes: int) -> bool:
        """Note a call of so many bytes; return whether the members agree anew."""
        if nbytes < _LARGE_BYTES:
            return False
        self._calls += 1
        return self._calls % _AGAIN_CALLS == _WARM_CALLS

    def agree(self, team: _Team, phase: int, nbytes: int, took_ns: int) -> None:
        """Let the slowest of all owners decide.

        Args:
            team: all members.
            phase: of the entry, in which the buffers of the stage are free.
            nbytes: of the tensor.
            took_ns: how long this rank was at work.
        """
        stage = team.stage
        if team.is_owner:
            own, all_ns = np.array([took_ns], np.int64), np.empty(len(team.hosts), np.int64)
            team.owners().gather(own.view(np.uint8), all_ns.view(np.uint8), [own.nbytes] * len(all_ns)).wait()
            stage.raw(stage.me, 0, 0, own.nbytes)[:] = all_ns.max(keepdims=True).view(np.uint8)
        stage.post(phase)
        stage.wait(phase)
        slowest_ns = max(int(stage.raw(slot, 0, 0, 8).view(np.int64)[0]) for slot in range(team.slots))
        self.is_high = nbytes > _HIGH * slowest_ns
        # Before all have looked, nobody uses the buffers again.
        stage.post(phase + 1)
        stage.wait(phase + 1)
