"""Shared code of the strategies for Lightning and Fabric: this rank, collectives, distributed optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

import horovod.torch as hvd
from horovod.errors import RequestError
from horovod.torch.optimizer_state import parameters_of

__all__ = ["Environment", "Ranks"]

_OPS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}
#: More backward passes than any script accumulates: then only ``synchronize`` sends gradients.
_ANY_NUMBER = 1 << 30


class Environment:
    """Horovod's ranks as a cluster environment: the part that strategies use."""

    def __init__(self) -> None:
        hvd.init()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return int(hvd.size())

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher decides."""

    def global_rank(self) -> int:
        """Return this rank."""
        return int(hvd.rank())

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher decides."""

    def local_rank(self) -> int:
        """Return this rank's index on its host."""
        return int(hvd.local_rank())

    def node_rank(self) -> int:
        """Return the index of this rank's host."""
        return int(hvd.cross_rank())

    def teardown(self) -> None:
        """Do nothing: the ranks outlive the strategy."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a number of processes that the launcher did not start.

        Raises:
            ValueError: the launcher started another number of processes.
        """
        every_gpu = torch.cuda.device_count()  # devices="auto"
        if num_devices * num_nodes not in (1, hvd.size(), every_gpu):
            raise ValueError(
                f"devices={num_devices}, num_nodes={num_nodes} ask for {num_devices * num_nodes} processes, and the "
                f"launcher started {hvd.size()}. Leave both out, and choose the number with: horovodrun -np N"
            )


#: Lightning's own strategy comes after the mixin, for mypy too.
_Mixin: Any = object


class Ranks(_Mixin):
    """Methods of a strategy, built on Horovod's collectives; a mixin before Lightning's own classes."""

    is_distributed = True
    parallel_devices: Any
    cluster_environment: Any
    _num_nodes = 1

    def __init__(self, **options: Any) -> None:
        super().__init__(cluster_environment=Environment(), **options)
        self.distributed: list[Any] = []  # the optimizers whose gradients are combined
        self._is_blocked = False

    def setup_environment(self) -> None:
        """Prepare the device, and let only rank 0 log from now on."""
        super().setup_environment()
        self.set_world_ranks()

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        kind = self.parallel_devices[0].type if self.parallel_devices else "cpu"
        if kind != "cuda":
            return torch.device(kind)
        return torch.device(kind, hvd.local_rank() % torch.cuda.device_count())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Sampler arguments that select this rank's share of the data."""
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def set_world_ranks(self) -> None:
        """Let only rank 0 log and save."""
        rank_zero_only.rank = hvd.rank()

    @property
    def num_nodes(self) -> int:
        """The number of hosts; Lightning sets it to what its user asked for."""
        return int(hvd.cross_size())

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def _configure_launcher(self) -> None:
        """Check what the user asked for; the processes exist."""
        self.cluster_environment.validate_settings(len(self.parallel_devices or "1"), self._num_nodes)

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks."""
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``."""
        return hvd.broadcast_object(obj, src, name="lightning.broadcast")

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension.

        Args:
            tensor: same shape and dtype on every rank.
            group: must be None.
            sync_grads: whether gradients flow back, summed over ranks, to the ranks that sent the tensors.
        """
        _no_group(group)
        gathered: torch.Tensor = hvd.allgather(tensor.unsqueeze(0), name="lightning.all_gather")
        if not sync_grads:
            return gathered.detach()
        if gathered.requires_grad:
            # Horovod's allgather averages gradients.
            gathered.register_hook(lambda gradient: gradient * hvd.size())  # type: ignore[no-untyped-call]
        return gathered

    def _reduce(self, tensor: Any, group: Any, op: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        _no_group(group)
        name = "mean" if op is None else op.lower() if isinstance(op, str) else str(op).rpartition(".")[2].lower()
        if name not in _OPS:
            raise RequestError(f"reduce_op must be one of {', '.join(_OPS)}. Received: {op!r}")
        if _OPS[name] == hvd.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.float32)  # the mean of integers need not be an integer
        return hvd.allreduce(tensor, op=_OPS[name], name="lightning.reduce")

    def _distribute(self, optimizer: Any, names: dict[torch.Tensor, str]) -> Any:
        """Return a distributed optimizer with rank 0's state."""
        own = parameters_of(optimizer)
        known = [(names[p], p) for p in own if p in names]
        strange = len(own) > len(known)
        # A script may set up the same model again, with another optimizer.
        self.distributed = [earlier for earlier in self.distributed if set(own).isdisjoint(parameters_of(earlier))]
        made = hvd.DistributedOptimizer(optimizer, named_parameters=None if strange else known)
        if not isinstance(made, torch.optim.LBFGS):  # its state is empty so far, or from a checkpoint
            hvd.broadcast_optimizer_state(made, root_rank=0)
        self.distributed.append(made)
        return made

    @contextmanager
    def _blocked(self, passes_are_known: bool) -> Iterator[None]:
        """Return a context in which backward passes accumulate gradients locally."""
        for optimizer in self.distributed:
            if not passes_are_known and optimizer.backward_passes_per_step != _ANY_NUMBER:
                optimizer.set_backward_passes_per_step(_ANY_NUMBER)
        before, self._is_blocked = self._is_blocked, True
        try:
            yield
        finally:
            self._is_blocked = before

    def _combined(self, optimizer: Any) -> AbstractContextManager[None]:
        """Return a context in which an optimizer steps with gradients that ``_after_backward`` has combined."""
        kept: AbstractContextManager[None] = nullcontext()
        return optimizer.skip_synchronize() if optimizer in self.distributed else kept

    def _after_backward(self) -> None:
        """Combine the gradients, so that later operations such as clipping use the combined ones."""
        if not self._is_blocked:
            for optimizer in self.distributed:
                optimizer.synchronize()


def _no_group(group: Any) -> None:
    if group is not None and type(group).__name__ != "group" and group != "WORLD":
        raise RequestError(f"group must be None: the strategy knows all ranks only. Received: {group!r}")
