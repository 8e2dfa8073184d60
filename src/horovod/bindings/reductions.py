"""The reductions of Horovod's API, written once over an ``Adapter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.bindings.misuse import warn_deprecated
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.submission import Submission, id_of, some
from horovod.core.requests import Kind, ReduceOp
from horovod.engine.calls import Call, call
from horovod.errors import RequestError

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Reductions", "Sum", "resolve_op"]

# An attribute of an enum class costs more than a name, in every operation.
_ALLREDUCE = Kind.ALLREDUCE

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def resolve_op(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that ``op`` and Horovod's older ``average`` ask for.

    Raises:
        ValueError: both are given, ``op`` is none of the reductions, or ``average`` is a name or a reduction.
    """
    if average is None:
        if op is None:
            return ReduceOp.AVERAGE
        if type(op) is ReduceOp:
            return op
        try:
            return ReduceOp(op)
        except ValueError:
            raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, received {op!r}") from None
    given: object = average  # the second argument of Horovod's functions, which is easily taken for another
    if isinstance(given, (str, ReduceOp)):
        meant = f"name={given!r}" if isinstance(given, str) else f"op=hvd.{given.name.capitalize()}"
        raise ValueError(f"average must be True or False, received {given!r}; did you mean {meant}?")
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warn_deprecated("Parameter `average` has been replaced with `op`")
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


class Reductions(Submission):
    """Allreduce and reducescatter: what combines the tensors of all ranks.

    Args:
        adapter: the framework.
    """

    # -- allreduce -----------------------------------------------------------------------------------------------

    def allreduce_async(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce into a new tensor; ``synchronize`` returns it. See ``allreduce``."""
        how = _allreduce(name, op, average, prescale_factor, postscale_factor, process_set)
        return self._start(how, (tensor,))

    def allreduce_async_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce in place; ``synchronize`` returns ``tensor``. See ``allreduce``."""
        how = _allreduce(name, op, average, prescale_factor, postscale_factor, process_set)
        return self._start(how, (tensor,), in_place=True)

    def allreduce(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> Any:  # fmt: skip
        """Combine a tensor over all ranks, element by element, into a new one.

        Args:
            tensor: same shape and dtype on every rank; is not changed.
            average: deprecated; ``op=Average`` or ``op=Sum`` instead.
            name: key of the match; ``None`` matches in the order of the calls.
            op: Average (the default), Sum, Min, Max or Product.
            prescale_factor: multiplies the tensor before it is combined.
            postscale_factor: multiplies the result.
            process_set: ranks that take part; this rank must be one of them.

        Raises:
            MismatchError: shapes, dtypes or arguments disagree; on every rank, with each rank's value.
            PeerLostError: a rank died.
            ValueError: the call is wrong by itself.
            NotInitializedError: ``init()`` was not called.

        Blocks until all ranks called.
        """
        how = _allreduce(name, op, average, prescale_factor, postscale_factor, process_set)
        return self._run_one(how, tensor)

    def allreduce_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> Any:  # fmt: skip
        """Combine a tensor over all ranks, in place. See ``allreduce``."""
        how = _allreduce(name, op, average, prescale_factor, postscale_factor, process_set)
        return self._run_one(how, tensor, in_place=True)

    def grouped_allreduce_async(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce of several tensors as one operation, for ``synchronize``. See ``grouped_allreduce``."""
        how = _allreduce(name, op, average, prescale_factor, postscale_factor, process_set)
        return self._start(how, some(tensors), many=True)

    def grouped_allreduce_async_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce of several tensors in place, as one operation. See ``grouped_allreduce``."""
        how = _allreduce(name, op, average, prescale_factor, postscale_factor, process_set)
        return self._start(how, some(tensors), in_place=True, many=True)

    def grouped_allreduce(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors as one operation. See ``allreduce``."""
        how = _allreduce(name, op, average, prescale_factor, postscale_factor, process_set)
        return self._run(how, some(tensors))

    def grouped_allreduce_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors in place, as one operation. See ``grouped_allreduce``."""
        how = _allreduce(name, op, average, prescale_factor, postscale_factor, process_set)
        return self._run(how, some(tensors), in_place=True)

    # -- reducescatter -------------------------------------------------------------------------------------------

    def reducescatter_async(
        self, tensor: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> int:  # fmt: skip
        """Begin a reducescatter. See ``reducescatter``."""
        how = _reducescatter(name, op, prescale_factor, postscale_factor, process_set)
        return self._start(how, (tensor,))

    def reducescatter(
        self, tensor: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> Any:  # fmt: skip
        """Combine a tensor over all ranks and return this rank's rows of the result.

        Args:
            tensor: same shape and dtype on every rank; of an uneven number of rows the first ranks get one more.
            name: key of the match; ``None`` matches in the order of the calls.
            op: Average (the default), Sum, Min, Max or Product.
            process_set: ranks that take part; this rank must be one of them.
            prescale_factor: multiplies the tensor before it is combined.
            postscale_factor: multiplies the result.

        Raises:
            MismatchError: shapes, dtypes or arguments disagree; on every rank, with each rank's value.
            PeerLostError: a rank died.
            ValueError: the call is wrong by itself.
            NotInitializedError: ``init()`` was not called.

        Blocks until all ranks called.
        """
        how = _reducescatter(name, op, prescale_factor, postscale_factor, process_set)
        return self._run_one(how, tensor)

    def grouped_reducescatter_async(
        self, tensors: Sequence[Any], name: str | None = None, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> int:  # fmt: skip
        """Begin a reducescatter of several tensors as one operation. See ``grouped_reducescatter``."""
        how = _reducescatter(name, op, prescale_factor, postscale_factor, process_set)
        return self._start(how, some(tensors), many=True)

    def grouped_reducescatter(
        self, tensors: Sequence[Any], name: str | None = None, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors and return this rank's rows of each, as one operation. See ``reducescatter``."""
        how = _reducescatter(name, op, prescale_factor, postscale_factor, process_set)
        return self._run(how, some(tensors))


def _allreduce(
    name: str | None, op: int | None, average: bool | None, prescale: float, postscale: float, process_set: ProcessSet
) -> Call:
    how = op if average is None and type(op) is ReduceOp else resolve_op(op, average)
    return call(_ALLREDUCE, name, id_of(process_set), how, prescale, postscale)


def _reducescatter(name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet) -> Call:
    how = resolve_op(op, None)
    if how is ReduceOp.ADASUM:
        raise RequestError("reducescatter takes Average, Sum, Min, Max or Product, received Adasum")
    return call(Kind.REDUCESCATTER, name, id_of(process_set), how, prescale, postscale)
