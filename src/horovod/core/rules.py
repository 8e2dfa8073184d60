"""What may be asked for at all: checked once per signature, at the call that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from horovod.core.requests import ITEMSIZE, Kind, ReduceOp, Request

__all__ = ["REDUCIBLE", "check"]

_REDUCTIONS = (Kind.ALLREDUCE, Kind.REDUCESCATTER)
_COMPLEX = ("complex64", "complex128")

#: The reductions that each dtype allows; Adasum needs an inner product, so a real floating dtype.
REDUCIBLE: dict[str, frozenset[ReduceOp]] = {
    dtype: frozenset(ReduceOp)
    - ({ReduceOp.ADASUM} if not dtype.startswith(("float", "bfloat")) else set())
    - ({ReduceOp.AVERAGE} if dtype == "bool" else set())
    - ({ReduceOp.MIN, ReduceOp.MAX} if dtype in _COMPLEX else set())
    for dtype in ITEMSIZE
}


def check(request: Request, members: Sequence[int] | None, rank: int) -> str:
    """Return why a request of ``rank`` is wrong by itself, or an empty string.

    Args:
        request: what was asked for.
        members: ranks of its process set; None when there is no such set.
        rank: who asks.
    """
    verb = request.kind.name.lower().replace("_", " ")
    if members is None:
        return f"{verb} on process set {request.process_set}, which does not exist; was it removed?"
    if rank not in members:
        return f"{verb} on process set {request.process_set}, of which rank {rank} is no member: it holds {[*members]}"
    for tensor in request.tensors:
        if tensor.dtype not in ITEMSIZE:
            return f"Tensor type {tensor.dtype} is not supported. Supported: {', '.join(ITEMSIZE)}"
        if request.kind in _REDUCTIONS and request.op not in REDUCIBLE[tensor.dtype]:
            allowed = ", ".join(sorted(op.name.capitalize() for op in REDUCIBLE[tensor.dtype]))
            return f"{request.op.name.capitalize()} of a {tensor.dtype} tensor is not defined; use one of {allowed}"
        if request.kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER) and not tensor.shape:
            return f"{verb} of a tensor without dimensions: there is no first dimension to work on; use reshape(1)"
    if request.kind is Kind.BROADCAST and request.root not in members:
        return f"broadcast received invalid root rank {request.root}; members are {[*members]}"
    if request.kind is Kind.ALLTOALL:
        return _check_splits(request, len(members))
    return ""


def _check_splits(request: Request, parts: int) -> str:
    rows = request.tensors[0].shape[0]
    splits = request.splits
    if not splits:
        if rows % parts:
            return f"alltoall of {rows} rows to {parts} ranks: not divisible, so pass splits="
        return ""
    if len(splits) != parts:
        return f"alltoall got {len(splits)} splits for {parts} ranks: {[*splits]}"
    if min(splits) < 0:
        return f"alltoall got a negative split: {[*splits]}"
    if sum(splits) != rows:
        return f"alltoall got splits {[*splits]}, which make {sum(splits)} rows, for a tensor of {rows}"
    return ""
