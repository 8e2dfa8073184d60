"""The other instances that train the same model: connection, comparison and sums of gradients."""

from __future__ import annotations

import collections
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch

import horovod.torch as hvd
import popdist
from popdist.backend import InstanceGroup, confinement
from poptorch.options import Options

__all__ = ["Instances"]

_made: collections.Counter[tuple[int, ...]] = collections.Counter()


class Instances:
    """The instances of one training model; a single instance never sends anything.

    Raises:
        RuntimeError: there are other instances, but they are not connected, or their number differs from the options.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._group = _group(options)
        members = self._group.members if self._group else ()
        self._name = f"poptorch.{_made[members]}"
        _made[members] += 1
        #: Number of replicas of all instances, and global index of this instance's first replica.
        self.replicas, self.first_replica = options.replication_factor, 0

    def compare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, hyperparameters: Any) -> Any:
        """Check that all instances have equal models and options, count replicas, copy the first instance's weights
        and its optimizer's state; return the first instance's hyperparameters.

        Raises:
            ValueError: models or options differ; the message names the instances.

        Blocks until all instances called.
        """
        group = self._group
        if group is None or group.process_set is None:
            return hyperparameters
        options, parameters = self._options, list(model.parameters())
        facts = {
            "device iterations": options.device_iterations,
            "gradient accumulation": options.Training.gradient_accumulation,
            "reduction of gradients": options.Training.reduction.name, "random seed": options.random_seed,
            "parameters": len(parameters), "elements of parameters": sum(p.numel() for p in parameters),
            "class of the optimizer": type(optimizer).__name__,
        }  # fmt: skip
        own = options.replication_factor, bool(optimizer.state), facts
        found = hvd.allgather_object(own, f"{self._name}.options", group.process_set)
        replicas, states, each = zip(*found, strict=True)
        for word in facts:
            if len(set(values := [of_one[word] for of_one in each])) > 1:
                raise ValueError(_difference(word, group.members, values))
        self.replicas, self.first_replica = sum(replicas), sum(replicas[: group.members.index(hvd.rank())])
        state = [value.detach() for value in (*model.parameters(), *model.buffers()) if value.numel()]
        handles = [
            hvd.broadcast_async_(
                value, root_rank=group.members[0], name=f"{self._name}.weight.{i}", process_set=group.process_set
            )
            for i, value in enumerate(state)
        ]
        for handle in handles:
            hvd.synchronize(handle)
        if any(states):  # perhaps of the first instance alone, where only that one loaded a checkpoint
            hvd.broadcast_optimizer_state(optimizer, group.members[0], process_set=group.process_set)
        return hvd.broadcast_object(hyperparameters, group.members[0], f"{self._name}.values", group.process_set)

    def add_up(self, gradients: Sequence[torch.Tensor], hyperparameters: Any) -> Any:
        """Overwrite gradients with their sum over instances; return the first instance's hyperparameters.

        Args:
            gradients: the same number on all instances.
            hyperparameters: of this instance; ``setOptimizer`` may have changed them on some instances alone.

        Blocks until all instances called.
        """
        group = self._group
        if group is None or group.process_set is None or not gradients:
            return hyperparameters
        digests = torch.zeros(len(group.members))  # of 24 bits: exact in float32, so that they join the gradients
        digests[group.members.index(hvd.rank())] = zlib.crc32(repr(hyperparameters).encode()) >> 8
        name, process_set = self._name, group.process_set
        hvd.grouped_allreduce_([*gradients, digests], op=hvd.Sum, name=f"{name}.gradient", process_set=process_set)
        if (digests == digests[0]).all():
            return hyperparameters
        return hvd.broadcast_object(hyperparameters, group.members[0], f"{name}.values", process_set)


def _group(options: Options) -> InstanceGroup | None:
    distributed = options.Distributed
    if distributed.numProcesses == 1:
        return None
    confined = confinement()
    if confined is not None:
        return confined
    if not hvd.is_initialized():
        library = popdist if popdist.isPopdistEnvSet() else hvd
        warnings.warn(
            f"this model trains on {distributed.numProcesses} instances that are not connected yet: call "
            f"{library.__name__}.init() at the beginning of the program; it is called now",
            UserWarning,
            stacklevel=2,
        )
        library.init()
    if (hvd.size(), hvd.rank()) != (distributed.numProcesses, distributed.processId):
        raise RuntimeError(
            f"options.Distributed says process {distributed.processId} of {distributed.numProcesses}, but this is rank "
            f"{hvd.rank()} of {hvd.size()}: start the program with poprun --num-replicas=N --num-instances="
            f"{distributed.numProcesses}, or call options.Distributed.disable()"
        )
    return InstanceGroup(tuple(range(hvd.size())), hvd.global_process_set)


def _difference(word: str, members: Sequence[int], values: Sequence[Any]) -> str:
    found = ", ".join(f"instance {member}: {value}" for member, value in zip(members, values, strict=True))
    return f"the instances train different things: {word} differ ({found}); set the same on every instance"
