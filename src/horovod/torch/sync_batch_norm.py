"""Batch normalization with the statistics of all ranks' batches.

Each layer does one collective in forward and one in backward. A rank sends its count, mean and sum of squared
deviations, not sums of squares, to avoid cancellation; float16 and bfloat16 are summed as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.bindings.process_sets import ProcessSet, global_process_set, id_or_none
from horovod.core.requests import ReduceOp
from horovod.torch.gradients import Saved, once
from horovod.torch.runtime import comm
from horovod.torch.unsafe import keep_out_of_graphs

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks, as if they were one.

    Inputs may have any batch size, different between ranks and even 0, on CPU and GPU; all ranks together need
    more than one value per channel. In evaluation, and with one rank, it is plain batch normalization. Gradients
    of weight and bias are this rank's part, like those of every other parameter: DistributedOptimizer reduces
    them.

    Args:
        num_features: number of channels, the second dimension of the input.
        eps: constant added to the variance.
        momentum: weight of the newest batch in the running statistics; ``None`` averages all batches.
        affine: whether the layer has weight and bias.
        track_running_stats: whether to keep running statistics for evaluation.
        process_set: ranks that take part.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: ``process_set`` is not a process set.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        keep_out_of_graphs()
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        id_or_none(process_set)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm expected an input of 2 or more dimensions. Received: {input.dim()}; "
                "the shape must be [batch, channels, ...], so add the missing ones with unsqueeze()"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm expected {self.num_features} channels in dimension 1. Received: {input.shape[1]}; "
                f"use num_features={input.shape[1]}, or move the channels to dimension 1"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; collective over the process set while training.

        Raises:
            ValueError: the input's shape does not fit; all ranks together have only one value per channel; or the
                process set is not registered.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        """
        self._check_input_dim(input)
        if not (self.training and comm.is_initialized() and self.process_set.size() != 1):
            return super().forward(input)
        output, mean, variance, count = _normalize(input, self.weight, self.bias, self.eps, self.process_set)
        if self.track_running_stats:
            self._track(mean, variance, int(count))
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace every batch normalization layer in ``module`` by a synchronized one with the same parameters.

        Args:
            module: module to change in place, unless it is a batch normalization layer itself.
            process_set: ranks that take part.

        Returns:
            ``module``, or the layer that replaces it.
        """
        if isinstance(module, _BatchNorm):
            return cls._converted(module, process_set)
        made: dict[torch.nn.Module, torch.nn.Module] = {}
        for parent in [*module.modules()]:
            # Not named_children(), which leaves out a second name of a layer.
            for name, child in parent._modules.items():
                if isinstance(child, _BatchNorm):
                    parent._modules[name] = made.setdefault(child, cls._converted(child, process_set))
        return module

    @classmethod
    def _converted(cls, layer: _BatchNorm, process_set: ProcessSet) -> _BatchNorm:
        if isinstance(layer, cls):
            return layer
        made = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_set)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(layer, name))
        made.training = layer.training
        return made


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, ...]:
        """Return the normalized input, and mean, biased variance and count of all ranks together."""
        mean, variance, count = _global_moments(input, process_set)
        if count < 2:
            raise ValueError(
                "SyncBatchNorm expected more than 1 value per channel over all ranks when training. "
                f"Received here: {list(input.shape)}"
            )
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.process_set = count, process_set
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        output = torch.addcmul(_wide(shift, input), input.to(scale.dtype), _wide(scale, input)).to(input.dtype)
        counted = torch.tensor(count, device="cpu")
        ctx.mark_non_differentiable(mean, variance, counted)
        return output, mean, variance, counted

    @staticmethod
    @once
    def backward(ctx: Any, saved: Saved, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """Return the gradients of input, weight and bias; the latter two are this rank's part."""
        input, weight, mean, inverse = saved
        dims = _all_but_channels(input)
        grad_wide = grad.to(mean.dtype)
        normal = (input.to(mean.dtype) - _wide(mean, input)) * _wide(inverse, input)
        sums = torch.stack([grad_wide.sum(dims), (grad_wide * normal).sum(dims)])
        # Clone: autograd counts views of one tensor as changed when a gradient is accumulated into one of them.
        grad_bias, grad_weight = sums[0].clone(), sums[1].clone()
        comm.allreduce_(sums, name="sync_batch_norm.sum_dy", op=ReduceOp.SUM, process_set=ctx.process_set)
        mean_grad, mean_dot = sums / ctx.count
        scale = inverse if weight is None else inverse * weight
        grad_input = (grad_wide - _wide(mean_grad, input) - normal * _wide(mean_dot, input)) * _wide(scale, input)
        # A layer may have no weight, or no bias.
        of_weight, of_bias = ctx.needs_input_grad[1:3]
        return grad_input, grad_weight if of_weight else None, grad_bias if of_bias else None, None, None


_normalize: Callable[..., tuple[torch.Tensor, ...]] = _Normalize.apply


def _all_but_channels(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _wide(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Give one value per channel the dimensions of the input."""
    return values.view(1, -1, *([1] * (input.dim() - 2)))


def _global_moments(input: torch.Tensor, process_set: ProcessSet) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean, biased variance and number of values per channel, over all ranks."""
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    # Send float64, which represents counts exactly.
    row = torch.zeros(1, 1 + 2 * channels, dtype=torch.float64, device=input.device)
    if count:
        variance, mean = torch.var_mean(input.to(dtype), _all_but_channels(input), correction=0)
        row[0, 0] = count
        row[0, 1 : 1 + channels] = mean
        row[0, 1 + channels :] = variance.to(torch.float64) * count
    rows = comm.allgather(row, name="sync_batch_norm.moments", process_set=process_set)
    counts, means, deviations = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    total = int(counts.sum())
    share = counts / max(total, 1)
    mean = (means * share).sum(dim=0)
    variance = deviations.sum(dim=0) / max(total, 1) + ((means - mean).square() * share).sum(dim=0)
    return mean.to(dtype), variance.to(dtype), total
