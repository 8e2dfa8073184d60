"""``HorovodFabricStrategy`` for Lightning's ``Fabric``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import horovod.torch as hvd
from horovod._lightning.ranks import Ranks

__all__ = ["HorovodFabricStrategy"]


class HorovodFabricStrategy(Ranks):
    """Run ``Fabric(strategy=HorovodFabricStrategy())`` on the ranks that the launcher has started.

    Args:
        accelerator: as for Fabric's own strategies.
        checkpoint_io: as for Fabric's own strategies.
        precision: as for Fabric's own strategies.

    Raises:
        InitError: the ranks did not find each other.
    """

    def __init__(self, accelerator: Any = None, checkpoint_io: Any = None, precision: Any = None) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision=precision)
        self._names: dict[torch.Tensor, str] = {}
        self._backward_sync_control = _Blocking(self)

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move a module to this rank's device."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Broadcast the module of rank 0 to all ranks."""
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        self._names |= {parameter: f"{len(self._names)}.{name}" for name, parameter in module.named_parameters()}
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Make an optimizer distributed."""
        return self._distribute(optimizer, self._names)

    def backward(self, tensor: torch.Tensor, module: Any = None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, and combine them over all ranks."""
        super().backward(tensor, module, *args, **kwargs)
        self._after_backward()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step with the gradients that ``backward`` has combined."""
        with self._combined(optimizer):
            return super().optimizer_step(optimizer, **kwargs)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor combined over all ranks; return other objects unchanged."""
        return self._reduce(tensor, group, reduce_op)


class _Blocking:
    def __init__(self, strategy: HorovodFabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy._blocked(passes_are_known=False) if enabled else nullcontext()
