"""The reductions of Horovod's API, and the arguments that choose one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.bindings.misuse import warn_deprecated
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.core.requests import ReduceOp
from horovod.errors import RequestError

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Reduction", "Sum", "refuse_adasum", "resolve_op"]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


@dataclass(frozen=True)
class Reduction:
    """How tensors are combined, and on which ranks.

    Attributes:
        op: the operation.
        prescale: factor applied before the operation.
        postscale: factor applied after the operation.
        process_set: ranks that take part.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for a collective."""
        return {
            "op": self.op, "prescale_factor": self.prescale, "postscale_factor": self.postscale,
            "process_set": self.process_set,
        }  # fmt: skip


def resolve_op(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that ``op`` or Horovod's older ``average`` selects.

    Raises:
        ValueError: both are given, ``op`` is no reduction, or ``average`` is a string or a reduction.
    """
    if average is None:
        if isinstance(op, ReduceOp):
            return op
        if op is None:
            return ReduceOp.AVERAGE
        try:
            return ReduceOp(op)
        except ValueError:
            raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, received {op!r}") from None
    given: object = average  # Horovod's second argument is easily mistaken for another one
    if isinstance(given, (str, ReduceOp)):
        meant = f"name={given!r}" if isinstance(given, str) else f"op=hvd.{given.name.capitalize()}"
        raise ValueError(f"average must be True or False, received {given!r}; did you mean {meant}?")
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warn_deprecated("Parameter `average` has been replaced with `op`")
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def refuse_adasum(op: ReduceOp) -> ReduceOp:
    """Return ``op`` if a reducescatter supports it.

    Raises:
        RequestError: ``op`` is Adasum.
    """
    if op is ReduceOp.ADASUM:
        raise RequestError("reducescatter takes Average, Sum, Min, Max or Product. Received: Adasum")
    return op
