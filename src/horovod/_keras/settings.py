"""The arguments of ``DistributedOptimizer``, checked once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from horovod import context
from horovod.bindings.compression import check_compression
from horovod.bindings.gradients.parameters import check_groups, check_passes, groups_argument, predivided
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.misuse import wrong_argument
from horovod.bindings.process_sets import ProcessSet, is_provisional, not_registered
from horovod.bindings.reductions import resolve_op
from horovod.core.requests import ReduceOp

__all__ = ["NAME", "OPTIMIZER", "Settings", "alone", "make_settings"]

#: Explanations of arguments of ``DistributedOptimizer`` that are not settings.
OPTIMIZER = "a Keras optimizer, or its name. It becomes the distributed one, with its state."
NAME = "accepted; operations are named by the order in which optimizers are first used."


_alone: list[bool] = []


@contextmanager
def alone() -> Iterator[None]:
    """Return a context in which traced steps keep gradients local, as before the first rendezvous."""
    _alone.append(True)
    try:
        yield
    finally:
        _alone.pop()


@dataclass(frozen=True)
class Settings(ReduceSettings):
    """Settings of the reduction of one optimizer's gradients."""

    compression: Any = None
    # number of operations for all gradients, or lists of variables; 0 means one operation
    groups: int | list[list[Any]] = 0
    passes: int = 1  # backward passes per step; 1 uses the optimizer's own accumulation
    passes_are_averaged: bool = False  # whether the gradients of these passes are averaged, instead of summed
    local_is_scaled: bool = True  # whether gradients of local variables are divided by the number of ranks

    @property
    def active(self) -> bool:
        """Whether this rank combines gradients with other ranks."""
        if _alone or is_provisional():
            return False
        size = self.process_set.size()
        if size is None:
            raise wrong_argument(not_registered(self.process_set))
        # A step traced with one rank is kept when other ranks join.
        return (size > 1 or context.is_elastic()) and bool(self.process_set.included())

    @property
    def factor(self) -> float:
        """The factor for the gradients of a step; Keras' own accumulation averages over the passes."""
        return 1.0 if self.passes_are_averaged else float(self.passes)


def make_settings(
    *, op: int, compression: Any, process_set: ProcessSet, sparse_as_dense: bool, gradient_predivide_factor: float,
    num_groups: int, groups: int | Sequence[Sequence[Any]] | None, backward_passes_per_step: int,
    average_aggregated_gradients: bool, scale_local_gradients: bool,
) -> Settings:  # fmt: skip
    """Check the arguments of ``DistributedOptimizer`` and return its settings.

    Args:
        op: Average or Sum.
        compression: compressor of the gradients, such as ``Compression.fp16``.
        process_set: ranks that take part; on other ranks the optimizer works alone.
        sparse_as_dense: whether to send sparse gradients as dense ones.
        gradient_predivide_factor: divisor before the sum; the sum is divided by size / factor afterwards.
        num_groups: deprecated; use ``groups``.
        groups: lists of variables whose gradients are reduced together, or a number of groups; by default one group.
        backward_passes_per_step: number of passes accumulated before gradients are combined and applied. Keras 3's
            own ``gradient_accumulation_steps`` does the same, and averages over the passes.
        average_aggregated_gradients: whether to average over these passes, instead of summing.
        scale_local_gradients: whether to divide the gradients of local variables by the number of ranks.

    Raises:
        RequestError: an argument is invalid.
    """
    how = resolve_op(op, None)
    if how not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise wrong_argument(f"op of a Keras optimizer must be Average or Sum. Received: {how.name.capitalize()}")
    prescale, postscale = predivided(how, gradient_predivide_factor)
    check_passes(backward_passes_per_step)
    check_compression(compression)
    groups = groups_argument(num_groups, groups)
    if not isinstance(groups, int) or groups < 0:
        groups = check_groups((), groups, lambda entry: hasattr(entry, "shape")) or 0
    return Settings(
        op=how,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        passes=int(backward_passes_per_step),
        passes_are_averaged=average_aggregated_gradients,
        local_is_scaled=scale_local_gradients,
    )
