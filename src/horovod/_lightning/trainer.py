"""``HorovodStrategy`` for Lightning's ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import Metric

import horovod.torch as hvd
from horovod._lightning.ranks import Ranks

__all__ = ["HorovodStrategy"]


class HorovodStrategy(Ranks):
    """Train with the ranks that ``horovodrun``, or another launcher known to Horovod, has started.

    Gradients of all optimizers are averaged while backward runs; clipping and hooks see the averages. Lightning shards
    data loaders, and saves checkpoints on rank 0, as with its own strategies.

    Args:
        accelerator: as for Lightning's own strategies.
        checkpoint_io: as for Lightning's own strategies.
        precision_plugin: as for Lightning's own strategies.
        scale_lr: whether to multiply the learning rates by the number of ranks, as in Lightning 1's strategy.

    Raises:
        InitError: the ranks did not find each other.
    """

    strategy_name = "horovod"
    model: Any
    optimizers: Any
    lightning_module: Any
    lr_scheduler_configs: Any

    def __init__(
        self, accelerator: Any = None, checkpoint_io: Any = None, precision_plugin: Any = None, scale_lr: bool = False
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._scales_lr = scale_lr

    def setup(self, trainer: Any) -> None:
        """Broadcast the model of rank 0, and make the optimizers distributed."""
        if trainer.state.fn == "fit" and self._layer_sync:
            self.model = hvd.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.distributed = []
        super().setup(trainer)
        if self.model is not None:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            for module in self.model.modules():
                if isinstance(module, Metric) and module.dist_sync_fn is None:
                    module.dist_sync_fn, module.distributed_available_fn = _gather, hvd.is_initialized

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers distributed."""
        super().setup_optimizers(trainer)
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        if self._scales_lr:
            self._scale(hvd.size())
        self.optimizers = [self._distribute(optimizer, names) for optimizer in self.optimizers]

    def _scale(self, factor: int) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor
                if "initial_lr" in group:
                    group["initial_lr"] *= factor
        for config in self.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [lr * factor for lr in config.scheduler.base_lrs]

    def model_to_device(self) -> None:
        """Move the model to this rank's device."""
        self.model.to(self.root_device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Follow ``accumulate_grad_batches``, which callbacks may change between steps."""
        trainer = self.lightning_module.trainer
        if self.lightning_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in self.distributed:
                if optimizer.backward_passes_per_step != trainer.accumulate_grad_batches:
                    optimizer.set_backward_passes_per_step(trainer.accumulate_grad_batches)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which backward passes accumulate gradients locally."""
        with self._blocked(passes_are_known=self.lightning_module.automatic_optimization):
            yield

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients, and combine them over all ranks before ``on_after_backward``."""
        plugin, module = self.precision_plugin, self.lightning_module
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._after_backward()
        loss: torch.Tensor = plugin.post_backward(closure_loss, module)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step with the gradients that ``backward`` has combined."""
        with self._combined(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor combined over all ranks; return other objects unchanged."""
        return self._reduce(tensor, group, reduce_op)

    def on_train_end(self) -> None:
        """Wait for ranks that have more batches, and take the model of the first of those that have the most."""
        hvd.join()
        steps = hvd.allgather(torch.tensor([self.lightning_module.trainer.global_step]), name="lightning.steps")
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=int(steps.argmax()))


def _gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks; first dimensions may differ; for metrics over all ranks."""
    rows = tensor if tensor.dim() else tensor.unsqueeze(0)
    counts = hvd.allgather(torch.tensor([len(rows)]), name="lightning.rows").tolist()
    parts = torch.split(hvd.allgather(rows, name="lightning.metric"), counts)
    return [part if tensor.dim() else part[0] for part in parts]
