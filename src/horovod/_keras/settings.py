"""The arguments of ``DistributedOptimizer``, checked once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from horovod import context
from horovod.bindings.compression import check_compression
from horovod.bindings.misuse import warn_deprecated, wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set, is_provisional
from horovod.bindings.reductions import resolve_op
from horovod.core.requests import ReduceOp

__all__ = ["NAME", "OPTIMIZER", "Settings", "alone", "make_settings"]

#: Explanations of arguments of ``DistributedOptimizer`` that are no settings.
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
class Settings:
    """Settings of the reduction of one optimizer's gradients.

    Attributes:
        op: Average or Sum.
        compression: compressor of the sent gradients.
        process_set: ranks that take part.
        sparse_as_dense: whether sparse gradients are sent as dense ones.
        predivide: divisor before the sum; the sum is divided by size / predivide afterwards.
        groups: number of operations for all gradients, or lists of variables; 0 means one operation.
        passes: backward passes per step; 1 uses the optimizer's own accumulation.
        passes_are_averaged: whether the gradients of these passes are averaged, instead of summed.
        local_is_scaled: whether gradients of local variables are divided by the number of ranks.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    compression: Any = None
    process_set: ProcessSet = global_process_set
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: int | tuple[tuple[Any, ...], ...] = 0
    passes: int = 1
    passes_are_averaged: bool = False
    local_is_scaled: bool = True

    @property
    def active(self) -> bool:
        """Whether this rank combines gradients with other ranks."""
        if _alone or is_provisional():
            return False
        size = self.process_set.size()
        if size is None:
            raise wrong_argument(
                f"{self.process_set} is not registered; call add_process_set() or pass it to init(process_sets=) first"
            )
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
    if gradient_predivide_factor != 1.0 and how is not ReduceOp.AVERAGE:
        raise wrong_argument(
            "gradient_predivide_factor needs op=Average. "
            f"Received: gradient_predivide_factor={gradient_predivide_factor}, op={how.name.capitalize()}"
        )
    if backward_passes_per_step < 1:
        raise wrong_argument(f"backward_passes_per_step must be 1 or more. Received: {backward_passes_per_step}")
    check_compression(compression)
    if num_groups:
        warn_deprecated("num_groups is deprecated, use groups instead")
        groups = num_groups if groups is None else groups
    return Settings(
        op=how,
        compression=compression,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        predivide=float(gradient_predivide_factor),
        groups=_check_groups(groups),
        passes=int(backward_passes_per_step),
        passes_are_averaged=average_aggregated_gradients,
        local_is_scaled=scale_local_gradients,
    )


def _check_groups(groups: int | Sequence[Sequence[Any]] | None) -> int | tuple[tuple[Any, ...], ...]:
    if groups is None:
        return 0
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        return groups
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise wrong_argument(
            f"groups must be a number of groups, or a list of lists of variables. Received: {groups!r}"
        )
    seen: set[int] = set()
    for variable in (variable for group in groups for variable in group):
        if id(variable) in seen:
            raise wrong_argument(f"the variable {getattr(variable, 'name', variable)} is twice in groups")
        seen.add(id(variable))
    return tuple(tuple(group) for group in groups)
