"""Distributed replicated graphs: gradients are summed over all processes, as by the device's own network."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from popart.errors import popart_exception
from popart.execution import Exchange
from popart.options import SessionOptions
from popart.tensors import to_numpy

__all__ = ["OverProcesses"]

_sessions = itertools.count()


class OverProcesses(Exchange):
    """Sums gradients over all processes, matched by name, while backward continues.

    Args:
        options: options of the session; ``globalReplicationFactor`` must be the replicas of all processes together.

    Raises:
        popart_exception: ``globalReplicationFactor`` has another value.
    """

    gives_weights = False

    def __init__(self, options: SessionOptions) -> None:
        import horovod.numpy as hvd

        self._hvd = hvd
        hvd.init()
        self.processes, replicas = hvd.size(), options.replicas()
        expected = (self.processes * replicas, hvd.rank() * replicas)
        found = (int(options.globalReplicationFactor), int(options.globalReplicaOffset))
        if found != expected:
            raise popart_exception(
                f"globalReplicationFactor={found[0]} and globalReplicaOffset={found[1]} do not fit process "
                f"{hvd.rank()} of {self.processes} with {replicas} replicas each, which makes {expected[0]} and "
                f"{expected[1]}. Were all processes started, by horovodrun or poprun?"
            )
        self._name = f"popart.{next(_sessions)}"
        self._handles: dict[str, int] = {}

    def compare(self, facts: Mapping[str, str], more: bool = False) -> list[bool]:
        """Raise in all processes if a fact, by name, is not the same in all of them; else return ``more`` of each."""
        found = self._hvd.allgather_object((facts, more), f"{self._name}.facts")
        for name in facts:
            if len({own.get(name) for own, _ in found}) > 1:
                shown = "; ".join(f"process {number}: {own.get(name)}" for number, (own, _) in enumerate(found))
                raise popart_exception(f"the processes train different things: {name} differs ({shown})")
        return [one for _, one in found]

    def store(self, weight: str, gradient: torch.Tensor) -> None:
        """Start the sum of a gradient; first wait for a sum left by an interrupted step."""
        if (left := self._handles.pop(weight, None)) is not None:
            self._hvd.synchronize(left)
        array = to_numpy(gradient)
        self._handles[weight] = self._hvd.allreduce_async(array, op=self._hvd.Sum, name=f"{self._name}.{weight}")

    def load(self, weight: str) -> torch.Tensor:
        """Wait for the sum and return it."""
        return torch.from_numpy(self._hvd.synchronize(self._handles.pop(weight)))

    def broadcast(self, arrays: Mapping[str, object], root: int) -> None:
        """Overwrite arrays with the root's, which are matched by name."""
        named = [(f"{self._name}.broadcast.{name}", array) for name, array in arrays.items()]
        for handle in [self._hvd.broadcast_async_(array, root, name=name) for name, array in named]:
            self._hvd.synchronize(handle)
