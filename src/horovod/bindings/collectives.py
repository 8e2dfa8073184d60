"""The collectives of Horovod's API, written once over an ``Adapter``.

One function describes each collective; ``variants`` derives its forms, and ``submission`` runs them.
"""

from __future__ import annotations

from typing import Any

from horovod import context
from horovod.bindings.docstrings import explained_like
from horovod.bindings.job import JobFunctions
from horovod.bindings.misuse import is_integer, without_class_names
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import Average, check_factors, refuse_adasum, resolve_op
from horovod.bindings.submission import Submission, id_of
from horovod.bindings.variants import asynchronous, grouped, synchronous
from horovod.core.requests import Kind
from horovod.engine.calls import Call, call

__all__ = ["Collectives", "check_root"]

_engine = context.engine


def _allreduce(
    tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Call:  # fmt: skip
    """Combine a tensor over all ranks, element by element, into a new one.

    Args:
        tensor: same shape and dtype on every rank; is not changed.
        average: deprecated; ``op=Average`` or ``op=Sum`` instead.
        name: key of the match; ``None`` matches in the order of the calls.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies the tensor before it is combined.
        postscale_factor: multiplies the result.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        MismatchError: shapes, dtypes or arguments disagree; on every rank, with each rank's value. The job goes on.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        ValueError: an argument of this rank is invalid.
        NotInitializedError: ``init()`` was not called.

    Blocks until all ranks called.
    """
    how = resolve_op(op, average)
    return call(Kind.ALLREDUCE, name, id_of(process_set), how, *check_factors(prescale_factor, postscale_factor))


@explained_like(
    _allreduce,
    tensor="same shape and dtype on every rank; if the rows do not divide evenly, the first ranks get one more.",
    op="Average (the default), Sum, Min, Max or Product.",
)
def _reducescatter(
    tensor: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Call:  # fmt: skip
    """Combine a tensor over all ranks and return this rank's rows of the result.

    Returns:
        A new tensor of the same dtype and device; only the first dimension is smaller.
    """
    how = refuse_adasum(resolve_op(op, None))
    return call(Kind.REDUCESCATTER, name, id_of(process_set), how, *check_factors(prescale_factor, postscale_factor))


@explained_like(_allreduce, tensor="at least one dimension; the first may differ between ranks and may be 0.")
def _allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Call:
    """Concatenate every rank's tensor along the first dimension, in rank order.

    Returns:
        A new tensor of the same dtype and device; only the first dimension is larger.

    Raises:
        MismatchError: dtypes, or dimensions after the first, disagree; on every rank, with each rank's value. The job
            goes on.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        ValueError: an argument of this rank is invalid.
        NotInitializedError: ``init()`` was not called.
    """
    return call(Kind.ALLGATHER, name, id_of(process_set))


@explained_like(_allreduce, root_rank="the rank whose values are returned; a global rank also within a process set.")
def _broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    """Return the root's tensor.

    Returns:
        A new tensor of the same shape, dtype and device.
    """
    return call(Kind.BROADCAST, name, id_of(process_set), root=check_root(root_rank))


def check_root(root_rank: Any) -> int:
    """Return a root rank as an integer.

    Raises:
        TypeError: ``root_rank`` is not an integer.
    """
    if not is_integer(root_rank):
        raise TypeError(f"root_rank must be an integer. Received: {root_rank!r}")
    number: int = root_rank.__index__()
    return number


@without_class_names
class Collectives(Submission, JobFunctions):
    """The collectives of one framework."""

    allreduce = synchronous(_allreduce)
    allreduce_ = synchronous(_allreduce, in_place=True)
    allreduce_async = asynchronous(_allreduce)
    allreduce_async_ = asynchronous(_allreduce, in_place=True)
    grouped_allreduce, grouped_allreduce_async = grouped(_allreduce)
    grouped_allreduce_, grouped_allreduce_async_ = grouped(_allreduce, in_place=True)
    reducescatter = synchronous(_reducescatter)
    reducescatter_async = asynchronous(_reducescatter)
    grouped_reducescatter, grouped_reducescatter_async = grouped(_reducescatter)
    allgather = synchronous(_allgather)
    allgather_async = asynchronous(_allgather)
    grouped_allgather, grouped_allgather_async = grouped(_allgather)
    broadcast = synchronous(_broadcast)
    broadcast_ = synchronous(_broadcast, in_place=True)
    broadcast_async = asynchronous(_broadcast)
    broadcast_async_ = asynchronous(_broadcast, in_place=True)

    def allgather_into_async(
        self, output: Any, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start an allgather of equally shaped parts into existing memory; ``synchronize`` returns ``output``.

        Args:
            output: contiguous host tensor, as long as all parts together.
            tensor: this rank's part; may be this rank's part of ``output`` itself.
            name: key of the match; ``None`` matches in the order of the calls.
            process_set: ranks that take part; this rank must be one of them.
        """
        return self._start_into(call(Kind.ALLGATHER, name, id_of(process_set)), tensor, output)

    def alltoall_async(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start an alltoall; ``synchronize`` returns (output, received splits). See ``alltoall``."""
        return self._start(self._alltoall(splits, name, process_set), (tensor,))

    def _alltoall(self, splits: Any, name: str | None, process_set: ProcessSet) -> Call:
        numbers = () if splits is None else self.adapter.splits(splits)
        if splits is not None and not numbers:
            raise ValueError("alltoall got empty splits; pass None for even ones")
        return call(Kind.ALLTOALL, name, id_of(process_set), splits=numbers)

    def alltoall(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Send the i-th split of the rows to the i-th rank.

        Args:
            tensor: rows; the dimensions after the first agree on all ranks.
            splits: number of rows for each rank; ``None`` means the same number for all.
            name: key of the match; ``None`` matches in the order of the calls.
            process_set: ranks that take part; this rank must be one of them.

        Returns:
            The received rows in rank order; with ``splits`` also the number of rows received from each rank.

        Raises:
            MismatchError: dtypes, or dimensions after the first, disagree; on every rank, with each rank's value. The
                job goes on.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
            ValueError: an argument of this rank is invalid.
            NotInitializedError: ``init()`` was not called.

        Blocks until all ranks called.
        """
        how = self._alltoall(splits, name, process_set)
        if splits is None:
            return self._run_one(how, tensor)
        return self.synchronize(self._start(how, (tensor,)))

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Block until every rank has called.

        Args:
            process_set: ranks that take part; this rank must be one of them.

        Raises:
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        """
        self._run(call(Kind.BARRIER, None, id_of(process_set)), ())

    def join(self, device: int = -1) -> int:
        """Take no part in later operations of the other ranks; return when all ranks have joined.

        Args:
            device: accepted for compatibility with Horovod; ignored.

        Returns:
            The rank that joined last.

        Raises:
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

        Blocks until all ranks have joined.
        """
        handle = _engine().run(Call(Kind.JOIN, "join"), self.adapter)
        context.count_join()
        return handle.result
