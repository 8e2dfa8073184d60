"""The rules for a single request, checked once per signature, in the call that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from horovod.core.collectives import COLLECTIVES, is_reduction
from horovod.core.requests import ITEMSIZE, ReduceOp, Request

__all__ = ["REDUCIBLE", "check"]

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
