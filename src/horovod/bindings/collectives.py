"""The collectives of Horovod's API, written once over an ``Adapter``.

The variants of an operation differ only in where the result goes and who waits; ``submission`` does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod import context
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import Reductions
from horovod.bindings.submission import id_of, some
from horovod.bindings.worldly import Worldly
from horovod.core.requests import Kind
from horovod.engine.calls import Call, call

__all__ = ["Collectives"]

_engine = context.engine


class Collectives(Reductions, Worldly):
    """See the module; what combines tensors is in ``reductions``, what only moves them is here.

    Args:
        adapter: the framework.

    Attributes:
        joins: how many times this process has joined; the same on all ranks whenever nobody is in ``join``.
    """

    joins = 0

    # -- allgather -----------------------------------------------------------------------------------------------

    def allgather_async(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an allgather; ``synchronize`` returns the result. See ``allgather``."""
        return self._start(call(Kind.ALLGATHER, name, id_of(process_set)), (tensor,))

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
        return self._run_one(call(Kind.ALLGATHER, name, id_of(process_set)), tensor)

    def allgather_into_async(
        self, output: Any, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an allgather of parts of one shape into memory that is there; ``synchronize`` returns it.

        Args:
            output: contiguous, on the host, as long as all parts together.
            tensor: this rank's part, or this rank's part of ``output`` itself.
            name: key of the match; ``None`` matches in the order of the calls.
            process_set: ranks that take part; this rank must be one of them.
        """
        return self._start_into(call(Kind.ALLGATHER, name, id_of(process_set)), tensor, output)

    def grouped_allgather_async(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an allgather of several tensors as one operation, for ``synchronize``. See ``grouped_allgather``."""
        return self._start(call(Kind.ALLGATHER, name, id_of(process_set)), some(tensors), many=True)

    def grouped_allgather(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[Any]:
        """Concatenate several tensors, as one operation. See ``allgather``."""
        return self._run(call(Kind.ALLGATHER, name, id_of(process_set)), some(tensors))

    # -- broadcast -----------------------------------------------------------------------------------------------

    def broadcast_async(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin a broadcast into a new tensor. See ``broadcast``."""
        return self._start(call(Kind.BROADCAST, name, id_of(process_set), root=_rank(root_rank)), (tensor,))

    def broadcast_async_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin a broadcast in place. See ``broadcast``."""
        return self._start(
            call(Kind.BROADCAST, name, id_of(process_set), root=_rank(root_rank)), (tensor,), in_place=True
        )

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
        return self._run_one(call(Kind.BROADCAST, name, id_of(process_set), root=_rank(root_rank)), tensor)

    def broadcast_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Overwrite a tensor with the root's. See ``broadcast``."""
        return self._run_one(
            call(Kind.BROADCAST, name, id_of(process_set), root=_rank(root_rank)), tensor, in_place=True
        )

    # -- alltoall ------------------------------------------------------------------------------------------------

    def alltoall_async(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an alltoall; ``synchronize`` returns (output, received splits). See ``alltoall``."""
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
        how = self._alltoall(splits, name, process_set)
        if splits is None:
            return self._run_one(how, tensor)
        return self.synchronize(self._start(how, (tensor,)))

    # -- without data --------------------------------------------------------------------------------------------

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Return when every rank has called.

        Args:
            process_set: ranks that take part; this rank must be one of them.
        """
        self._run(call(Kind.BARRIER, None, id_of(process_set)), ())

    def join(self, device: int = -1) -> int:
        """Take no part in what the others still do; return when all ranks have joined.

        Args:
            device: accepted for Horovod's sake.

        Returns:
            The rank that joined last.
        """
        handle = _engine().run(Call(Kind.JOIN, "join"), self.adapter)
        Collectives.joins += 1  # of all frameworks
        return handle.result


def _rank(root: int) -> int:
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise TypeError(f"root_rank must be an integer, received {root!r}")
    return root.__index__()
