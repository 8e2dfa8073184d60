"""The table of collectives: the requirements of each kind on its tensors, and the shapes of its results. Pure.

A row describes a kind except for the data transfer: the rules for one rank's request, the properties that ranks must
share, and the shapes of the results. Transports register a routine per kind (``shm.transport.ROUTINES``,
``hierarchical.transport.ROUTINES``, ``on_device.ROUTINES``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horovod.core.requests import ITEMSIZE, Kind, ReduceOp, Request, Response
from horovod.splits import part_of

__all__ = [
    "COLLECTIVES", "REDUCIBLE", "Collective", "Shape", "check", "has_rows_of_others", "is_reduction", "keeps_shape",
    "result_shapes",
]  # fmt: skip

Shape = tuple[int, ...]
_MOST_ROWS = 2**31 - 1
_COMPLEX = ("complex64", "complex128")

#: The reductions that each dtype allows; Adasum needs an inner product, so a real floating dtype.
REDUCIBLE: dict[str, frozenset[ReduceOp]] = {
    dtype: frozenset(ReduceOp)
    - ({ReduceOp.ADASUM} if not dtype.startswith(("float", "bfloat")) else set())
    - ({ReduceOp.AVERAGE} if dtype == "bool" else set())
    - ({ReduceOp.MIN, ReduceOp.MAX} if dtype in _COMPLEX else set())
    for dtype in ITEMSIZE
}


def _no_rule(request: Request, members: Sequence[int]) -> str:
    return ""


def _splits_fit(request: Request, members: Sequence[int]) -> str:
    rows, splits, parts = request.tensors[0].shape[0], request.splits, len(members)
    if not splits:
        return f"alltoall of {rows} rows to {parts} ranks: not divisible, so pass splits=" if rows % parts else ""
    if len(splits) != parts:
        return f"alltoall got {len(splits)} splits for {parts} ranks: {[*splits]}"
    if min(splits) < 0:
        return f"alltoall got a negative split: {[*splits]}"
    if max(splits) > _MOST_ROWS:
        return (
            f"alltoall got splits {[*splits]}: at most {_MOST_ROWS} rows can go to one rank at a time, since received "
            "splits are 32-bit integers; send them in parts, or in wider rows"
        )
    if sum(splits) != rows:
        return f"alltoall got splits {[*splits]}, which make {sum(splits)} rows, for a tensor of {rows}"
    return ""


def _same(response: Response, index: int, me: int) -> Shape:
    return response.requests[0].tensors[index].shape


def _rows_of_all(response: Response, index: int, me: int) -> Shape:
    shapes = [response.request_of(i).tensors[index].shape for i in range(len(response.members))]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _rows_for_me(response: Response, index: int, me: int) -> Shape:
    return (sum(row[me] for row in response.splits()), *response.requests[0].tensors[index].shape[1:])


def _part_of_rows(response: Response, index: int, me: int) -> Shape:
    shape = response.requests[0].tensors[index].shape
    low, high = part_of(shape[0], len(response.members), me)
    return (high - low, *shape[1:])


@dataclass(frozen=True)
class Collective:
    """One row of the table."""

    # returns a result's shape, given a response, a tensor's index and this rank's place among the members
    shape: Callable[[Response, int, int], Shape]
    reduces: bool = False  # whether it combines values; then dtype and reduction must fit, and factors apply
    has_rows: bool = False  # whether it works on the first dimension; then tensors must have one
    rows_differ: bool = False  # whether ranks may have different numbers of rows; else they share the whole shape
    has_root: bool = False  # whether one rank is the root; then ranks must agree on it, and it must take part
    root_sends: bool = False  # whether only the root sends data, so that the inputs of other ranks are never read
    needs_all: bool = False  # whether it is refused while ranks of the process set have joined
    has_groups: bool = False  # whether several tensors can be one operation
    # an additional rule for one rank's request; returns the error, or an empty string
    check: Callable[[Request, Sequence[int]], str] = _no_rule


COLLECTIVES: dict[Kind, Collective] = {
    Kind.ALLREDUCE: Collective(_same, reduces=True, has_groups=True),
    Kind.ALLGATHER: Collective(_rows_of_all, has_rows=True, rows_differ=True, has_groups=True),
    Kind.BROADCAST: Collective(_same, has_root=True, root_sends=True),
    Kind.ALLTOALL: Collective(_rows_for_me, has_rows=True, rows_differ=True, needs_all=True, check=_splits_fit),
    Kind.REDUCESCATTER: Collective(_part_of_rows, reduces=True, has_rows=True, has_groups=True),
}
"""The collectives that move tensors; barriers, joins and process sets are not part of this."""


def is_reduction(kind: Kind) -> bool:
    """Whether a kind combines values."""
    return kind in COLLECTIVES and COLLECTIVES[kind].reduces


def keeps_shape(kind: Kind) -> bool:
    """Whether each result has the shape of its tensor; then the operation can be done in place."""
    return kind in COLLECTIVES and COLLECTIVES[kind].shape is _same


def has_rows_of_others(kind: Kind) -> bool:
    """Whether results contain rows of other members; these members may write their rows into the result."""
    return kind in COLLECTIVES and COLLECTIVES[kind].rows_differ


def result_shapes(response: Response, me: int) -> list[Shape]:
    """Return the shapes of a rank's results; ``me`` is its place among the members."""
    shape = COLLECTIVES[response.kind].shape
    return [shape(response, index, me) for index in range(len(response.requests[0].tensors))]


def check(request: Request, members: Sequence[int] | None, rank: int) -> str:
    """Return why a single request of ``rank`` is wrong, or an empty string; ``members`` is None if there is no such
    set.
    """
    verb = request.kind.name.lower().replace("_", " ")
    if members is None:
        return f"{verb} on process set {request.process_set}, which does not exist; was it removed?"
    if rank not in members:
        return (
            f"{verb} on process set {request.process_set}, of which rank {rank} is not a member: it holds {[*members]}"
        )
    row = COLLECTIVES.get(request.kind)
    for tensor in request.tensors:
        if tensor.dtype not in ITEMSIZE:
            return f"Tensor type {tensor.dtype} is not supported. Supported: {', '.join(ITEMSIZE)}"
        if is_reduction(request.kind) and request.op not in REDUCIBLE[tensor.dtype]:
            allowed = ", ".join(sorted(op.name.capitalize() for op in REDUCIBLE[tensor.dtype]))
            return f"{request.op.name.capitalize()} of {tensor.dtype} tensors is not defined; use one of {allowed}"
        if row is not None and row.has_rows and not tensor.shape:
            return f"{verb} of a tensor without dimensions: there is no first dimension to work on; use reshape(1)"
    if row is None:
        return ""
    if row.has_root and request.root not in members:
        return f"{verb} received invalid root rank {request.root}; members are {[*members]}"
    return row.check(request, members)
