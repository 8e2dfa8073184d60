"""The collectives of Horovod's API, written once over an ``Adapter``.

The variants of an operation differ only in where the result goes and who waits; ``submission`` does the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.submission import Submission, id_of
from horovod.bindings.worldly import Worldly
from horovod.core.requests import Kind, ReduceOp
from horovod.engine import context

__all__ = ["Adasum", "Average", "Collectives", "Max", "Min", "Product", "Sum", "resolve_op"]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_engine = context.engine


def resolve_op(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that ``op`` and Horovod's older ``average`` ask for.

    Raises:
        ValueError: both are given, or ``op`` is none of the reductions.
    """
    if average is None:
        if op is None:
            return ReduceOp.AVERAGE
        try:
            return ReduceOp(op)
        except ValueError:
            raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, received {op!r}") from None
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


class Collectives(Submission, Worldly):
    """See the module.

    Args:
        adapter: the framework.

    Attributes:
        joins: how many times this process has joined; the same on all ranks whenever nobody is in ``join``.
    """

    joins = 0

    # -- allreduce -----------------------------------------------------------------------------------------------

    def allreduce_async(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce into a new tensor; ``synchronize`` returns it. See ``allreduce``."""
        how = resolve_op(op, average)
        return self._start(
            Kind.ALLREDUCE, name, [tensor], None, process_set, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def allreduce_async_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce in place; ``synchronize`` returns ``tensor``. See ``allreduce``."""
        how = resolve_op(op, average)
        return self._start(
            Kind.ALLREDUCE, name, [tensor], [tensor], process_set, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

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
        how = resolve_op(op, average)
        return self._run(
            Kind.ALLREDUCE, name, [tensor], None, process_set, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )[0]  # fmt: skip

    def allreduce_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> Any:  # fmt: skip
        """Combine a tensor over all ranks, in place. See ``allreduce``."""
        how = ReduceOp.AVERAGE if op is None and average is None else resolve_op(op, average)
        buffer = self.adapter.buffer(tensor)
        if buffer is None:
            return self._run(
                Kind.ALLREDUCE, name, [tensor], [tensor], process_set, op=how, prescale=prescale_factor,
                postscale=postscale_factor,
            )[0]  # fmt: skip
        # The hot path of small tensors: nothing but what has to be done.
        engine = _engine()
        buffers = (buffer,)
        handle = engine.submit(
            self.adapter, Kind.ALLREDUCE, f"allreduce.{name}" if name else None, buffers, buffers, op=how,
            prescale=prescale_factor, postscale=postscale_factor, process_set=id_of(process_set), kick=False,
        )  # fmt: skip
        engine.wait(handle)
        return tensor

    def grouped_allreduce_async(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce of several tensors as one operation, for ``synchronize``. See ``grouped_allreduce``."""
        how = resolve_op(op, average)
        return self._start(
            Kind.ALLREDUCE, name, tensors, None, process_set, many=True, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def grouped_allreduce_async_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce of several tensors in place, as one operation. See ``grouped_allreduce``."""
        how = resolve_op(op, average)
        return self._start(
            Kind.ALLREDUCE, name, tensors, tensors, process_set, many=True, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def grouped_allreduce(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors as one operation. See ``allreduce``."""
        how = resolve_op(op, average)
        return self._run(
            Kind.ALLREDUCE, name, tensors, None, process_set, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def grouped_allreduce_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors in place, as one operation. See ``grouped_allreduce``."""
        how = resolve_op(op, average)
        return self._run(
            Kind.ALLREDUCE, name, tensors, tensors, process_set, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    # -- allgather -----------------------------------------------------------------------------------------------

    def allgather_async(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an allgather; ``synchronize`` returns the result. See ``allgather``."""
        return self._start(Kind.ALLGATHER, name, [tensor], None, process_set)

    def allgather(self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
        """Concatenate every rank's tensor along the first dimension, in rank order.

        Args:
            tensor: at least one dimension; the first may differ between ranks and may be 0.
            name: key of the match; ``None`` matches in the order of the calls.
            process_set: ranks that take part; this rank must be one of them.

        Raises:
            MismatchError: dtypes, or dimensions behind the first, disagree; on every rank, with each rank's value.
            PeerLostError: a rank died.
            ValueError: the call is wrong by itself.
            NotInitializedError: ``init()`` was not called.

        Blocks until all ranks called.
        """
        return self._run(Kind.ALLGATHER, name, [tensor], None, process_set)[0]

    def grouped_allgather_async(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an allgather of several tensors as one operation, for ``synchronize``. See ``grouped_allgather``."""
        return self._start(Kind.ALLGATHER, name, tensors, None, process_set, many=True)

    def grouped_allgather(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[Any]:
        """Concatenate several tensors, as one operation. See ``allgather``."""
        return self._run(Kind.ALLGATHER, name, tensors, None, process_set)

    # -- broadcast -----------------------------------------------------------------------------------------------

    def broadcast_async(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin a broadcast into a new tensor. See ``broadcast``."""
        return self._start(Kind.BROADCAST, name, [tensor], None, process_set, root=_rank(root_rank))

    def broadcast_async_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin a broadcast in place. See ``broadcast``."""
        return self._start(Kind.BROADCAST, name, [tensor], [tensor], process_set, root=_rank(root_rank))

    def broadcast(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Return the root's tensor.

        Args:
            tensor: same shape and dtype on every rank; is not changed.
            root_rank: whose values to return; a global rank also within a process set.
            name: key of the match; ``None`` matches in the order of the calls.
            process_set: ranks that take part; this rank must be one of them.

        Raises:
            MismatchError: shapes, dtypes or roots disagree; on every rank, with each rank's value.
            PeerLostError: a rank died.
            ValueError: the call is wrong by itself.
            NotInitializedError: ``init()`` was not called.

        Blocks until all ranks called.
        """
        return self._run(Kind.BROADCAST, name, [tensor], None, process_set, root=_rank(root_rank))[0]

    def broadcast_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Overwrite a tensor with the root's. See ``broadcast``."""
        return self._run(Kind.BROADCAST, name, [tensor], [tensor], process_set, root=_rank(root_rank))[0]

    # -- alltoall ------------------------------------------------------------------------------------------------

    def alltoall_async(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an alltoall; ``synchronize`` returns (output, received splits). See ``alltoall``."""
        numbers = () if splits is None else self.adapter.splits(splits)
        if splits is not None and not numbers:
            raise ValueError("alltoall got empty splits; pass None for even ones")
        return self._start(Kind.ALLTOALL, name, [tensor], None, process_set, splits=numbers)

    def alltoall(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Send the i-th split of the rows to the i-th rank.

        Args:
            tensor: rows; the dimensions behind the first agree on all ranks.
            splits: how many rows go to each rank; ``None`` means the same number to all.
            name: key of the match; ``None`` matches in the order of the calls.
            process_set: ranks that take part; this rank must be one of them.

        Returns:
            The received rows in rank order; with ``splits`` also how many came from each rank.

        Raises:
            MismatchError: dtypes, or dimensions behind the first, disagree; on every rank, with each rank's value.
            PeerLostError: a rank died.
            ValueError: the call is wrong by itself.
            NotInitializedError: ``init()`` was not called.

        Blocks until all ranks called.
        """
        output, received = self.synchronize(self.alltoall_async(tensor, splits, name, process_set))
        return output if splits is None else (output, received)

    # -- reducescatter -------------------------------------------------------------------------------------------

    def reducescatter_async(
        self, tensor: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> int:  # fmt: skip
        """Begin a reducescatter. See ``reducescatter``."""
        return self._start(
            Kind.REDUCESCATTER, name, [tensor], None, process_set, op=_scatter_op(op), prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

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
        return self._run(
            Kind.REDUCESCATTER, name, [tensor], None, process_set, op=_scatter_op(op), prescale=prescale_factor,
            postscale=postscale_factor,
        )[0]  # fmt: skip

    def grouped_reducescatter_async(
        self, tensors: Sequence[Any], name: str | None = None, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> int:  # fmt: skip
        """Begin a reducescatter of several tensors as one operation. See ``grouped_reducescatter``."""
        return self._start(
            Kind.REDUCESCATTER, name, tensors, None, process_set, many=True, op=_scatter_op(op),
            prescale=prescale_factor, postscale=postscale_factor,
        )  # fmt: skip

    def grouped_reducescatter(
        self, tensors: Sequence[Any], name: str | None = None, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors and return this rank's rows of each, as one operation. See ``reducescatter``."""
        return self._run(
            Kind.REDUCESCATTER, name, tensors, None, process_set, op=_scatter_op(op), prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    # -- without data --------------------------------------------------------------------------------------------

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Return when every rank has called.

        Args:
            process_set: ranks that take part; this rank must be one of them.
        """
        self._run(Kind.BARRIER, None, [], [], process_set)

    def join(self, device: int = -1) -> int:
        """Take no part in what the others still do; return when all ranks have joined.

        Args:
            device: accepted for Horovod's sake.

        Returns:
            The rank that joined last.
        """
        engine = _engine()
        handle = engine.submit(self.adapter, Kind.JOIN, "join", (), (), kick=False)
        engine.wait(handle)
        Collectives.joins += 1  # of all frameworks
        return handle.result


def _rank(root: int) -> int:
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise TypeError(f"root_rank must be an integer, received {root!r}")
    return root.__index__()


def _scatter_op(op: int) -> ReduceOp:
    how = resolve_op(op, None)
    if how is ReduceOp.ADASUM:
        raise ValueError("reducescatter takes Average, Sum, Min, Max or Product, received Adasum")
    return how
