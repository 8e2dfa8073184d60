"""``DistributedOptimizer``: a torch optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horovod import context
from horovod.bindings.compression import BucketCompressor, check_compression
from horovod.bindings.gradients.parameters import (
    check_groups,
    check_names,
    check_passes,
    groups_argument,
    predivided,
)
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.misuse import type_name, wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import resolve_op
from horovod.core.requests import ReduceOp
from horovod.torch.adasum import AdasumMethods
from horovod.torch.compression import Compression, Compressor
from horovod.torch.host_optimizer import HostMethods, check_shardable
from horovod.torch.optimizer_methods import OptimizerMethods
from horovod.torch.optimizer_state import parameters_of
from horovod.torch.unsafe import keep_out_of_graphs

__all__ = ["DistributedOptimizer"]

#: Horovod's name of the class, which libraries import for their annotations (Ludwig).
_DistributedOptimizer = OptimizerMethods


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | BucketCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    host_optimizer: bool = False,
) -> Any:
    """Make an optimizer step with the gradients of all ranks.

    Gradients are reduced in buckets while backward still runs; ``step()`` waits for them. From the first
    ``step()`` on each ``p.grad`` is a view of its bucket, which the next backward overwrites: clone a
    gradient that must be kept.

    If a parameter has a gradient only on some ranks, the other ranks contribute zeros; a parameter without one
    on any rank keeps none. Gradients of several backward passes are summed, then combined over ranks.

    Args:
        optimizer: any torch optimizer. The new optimizer shares its state and its groups.
        named_parameters: names for messages, the same on every rank; typically ``model.named_parameters()``.
        compression: compressor of the gradients, such as ``Compression.fp16``; see docs/extending.md to write one.
        backward_passes_per_step: number of backward passes that are accumulated locally before a step.
        op: Average, Sum, Min, Max, Product, or Adasum.
        gradient_predivide_factor: divisor before the sum; the sum is divided by size / factor afterwards.
        num_groups: deprecated; use ``groups``.
        groups: lists of parameters whose gradients share a bucket, or a number of groups. By default
            gradients are reduced in buckets of HOROVOD_BUCKET_BYTES.
        sparse_as_dense: whether to send sparse gradients as dense ones.
        process_set: ranks that take part; on other ranks the optimizer works alone.
        host_optimizer: whether each rank steps only its share of every bucket, in host memory, and sends the new
            weights to the others: optimizer state then exists once, not on every rank. See docs/host_optimizer.md.

    Returns:
        An optimizer; its class derives from the class of ``optimizer`` and has the same name.

    Raises:
        RequestError: an argument is invalid; names are missing or occur twice.
        NotInitializedError: ``init()`` was not called.
    """
    op = resolve_op(op, None)
    context.world()
    keep_out_of_graphs()
    if isinstance(optimizer, OptimizerMethods):
        raise wrong_argument("optimizer is a DistributedOptimizer already; wrap the plain one, once")
    prescale, postscale = predivided(op, gradient_predivide_factor)
    if not hasattr(optimizer, "param_groups"):
        raise wrong_argument(
            "optimizer must be a torch optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1). "
            f"Received: {type_name(optimizer)}"
        )
    check_compression(compression, buckets=op is not ReduceOp.ADASUM and not host_optimizer)
    check_passes(backward_passes_per_step)
    groups = groups_argument(num_groups, groups)
    parameters = parameters_of(optimizer)
    named = check_names(parameters, named_parameters)
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    # Groups may name parameters of the model that the optimizer does not have.
    own = set(map(id, parameters))
    together = check_groups(learning, groups, lambda entry: id(entry) in own or isinstance(entry, torch.nn.Parameter))
    settings = ReduceSettings(op, prescale, postscale, process_set, compression, sparse_as_dense)
    # The size of an elastic job is not known yet.
    has_others = (process_set.size() or 1) > 1 or context.is_elastic()
    members: type = AdasumMethods if op is ReduceOp.ADASUM and has_others else OptimizerMethods
    if host_optimizer:
        check_shardable(optimizer, settings, host_optimizer)
        members = HostMethods
    cls = type(optimizer)
    distributed: Any = object.__new__(
        type(cls.__name__, (members, cls), {"__doc__": cls.__doc__, "__module__": __name__})
    )
    # Share state and groups, so that schedulers and checkpoints of the plain optimizer keep working. A scheduler
    # may have set its own ``step`` on the plain optimizer; do not copy that.
    distributed.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]  # else the scheduler warns: no step
    distributed._set_up(settings, backward_passes_per_step, named, together)
    if isinstance(distributed, HostMethods):
        distributed._shard(cls)
    return distributed
