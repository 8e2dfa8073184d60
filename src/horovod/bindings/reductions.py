"""The reductions of Horovod's API, and the arguments that choose one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod.bindings.misuse import warn_deprecated
from horovod.bindings.process_sets import ProcessSet, global_process_set, id_or_none
from horovod.core.requests import ReduceOp
from horovod.errors import RequestError

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Reduction",
    "Sum",
    "check_factors",
    "refuse_adasum",
    "resolve_op",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


@dataclass(frozen=True)
class Reduction:
    """How tensors are combined, and on which ranks."""

    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0  # factor applied before the operation
    postscale: float = 1.0  # factor applied after the operation
    process_set: ProcessSet = global_process_set  # ranks that take part

    def __post_init__(self) -> None:
        id_or_none(self.process_set)  # a list of ranks is no process set

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
        RequestError: both are given, ``op`` is not a reduction, or ``average`` is one.
    """
    if average is None:
        if isinstance(op, ReduceOp):
            return op
        if op is None:
            return ReduceOp.AVERAGE
        # Other libraries number theirs differently: torch.distributed's SUM is 0, which is Average here.
        if isinstance(op, int | np.integer) and not isinstance(op, bool) and op in list(ReduceOp):
            return ReduceOp(op)
        raise RequestError(f"op must be Average, Sum, Adasum, Min, Max or Product, received {op!r}")
    given: object = average  # Horovod's second argument is easily mistaken for another one
    if isinstance(given, ReduceOp):
        raise RequestError(f"average must be True or False; did you mean op=hvd.{given.name.capitalize()}?")
    if op is not None:
        raise RequestError("The op parameter supersedes average. Please provide only one of them.")
    # Published scripts call allreduce(loss, "loss"), which is an average in Horovod, too.
    hint = f"; {given!r} counts as {bool(given)}, did you mean name={given!r}?" if isinstance(given, str) else ""
    warn_deprecated(f"Parameter `average` has been replaced with `op`{hint}")
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def check_factors(prescale: Any, postscale: Any) -> tuple[float, float]:
    """Return the factors of a reduction as floats.

    Raises:
        RequestError: they are not finite numbers, or no values yet while a framework traces.
    """
    # Each call of a reduction comes here, most of them with plain floats.
    if type(prescale) is type(postscale) is float and math.isfinite(prescale + postscale):
        return prescale, postscale
    if not isinstance(prescale, str | bytes) and not isinstance(postscale, str | bytes):  # float() would take them
        try:
            found = float(prescale), float(postscale)
            if math.isfinite(found[0]) and math.isfinite(found[1]):
                return found
        except (TypeError, ValueError):
            pass
    raise RequestError(
        f"prescale_factor and postscale_factor must be finite numbers. Received: {prescale!r}, {postscale!r}"
    )


def refuse_adasum(op: ReduceOp) -> ReduceOp:
    """Return ``op`` if a reducescatter supports it.

    Raises:
        RequestError: ``op`` is Adasum.
    """
    if op is ReduceOp.ADASUM:
        raise RequestError("reducescatter takes Average, Sum, Min, Max or Product. Received: Adasum")
    return op
