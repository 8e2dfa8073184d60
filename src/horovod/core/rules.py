"""The rules for a single request, checked once per signature, in the call that is wrong.

``python -m horovod.core.rules`` prints the page ``docs/dtypes.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.core.collectives import COLLECTIVES, is_reduction
from horovod.core.requests import ITEMSIZE, ReduceOp, Request

__all__ = ["REDUCIBLE", "check", "markdown"]

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
    """Return why a single request of ``rank`` is wrong, or an empty string.

    Args:
        request: the request.
        members: ranks of its process set; None if the set does not exist.
        rank: the requesting rank.
    """
    verb = request.kind.name.lower().replace("_", " ")
    if members is None:
        return f"{verb} on process set {request.process_set}, which does not exist; was it removed?"
    if rank not in members:
        return f"{verb} on process set {request.process_set}, of which rank {rank} is no member: it holds {[*members]}"
    row = COLLECTIVES.get(request.kind)
    for tensor in request.tensors:
        if tensor.dtype not in ITEMSIZE:
            return f"Tensor type {tensor.dtype} is not supported. Supported: {', '.join(ITEMSIZE)}"
        if is_reduction(request.kind) and request.op not in REDUCIBLE[tensor.dtype]:
            allowed = ", ".join(sorted(op.name.capitalize() for op in REDUCIBLE[tensor.dtype]))
            return f"{request.op.name.capitalize()} of a {tensor.dtype} tensor is not defined; use one of {allowed}"
        if row is not None and row.has_rows and not tensor.shape:
            return f"{verb} of a tensor without dimensions: there is no first dimension to work on; use reshape(1)"
    return "" if row is None else row.check(request, members)


_ORDER = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.ADASUM)
_WHOLE = "sums and products wrap around; Average and scaling cut off towards zero"
_NOTES = {
    "bool": "Sum and Max are *or*, Product and Min are *and*; factors have no effect",
    "float16": "sums of three ranks or more, averages of an odd number and scaling go through float32",
    "bfloat16": "as float16",
    "float32": "added in float32",
    "float64": "added in float64",
    "complex64": "added and multiplied as complex numbers",
    "complex128": "as complex64",
}


def markdown() -> str:
    """The page ``docs/dtypes.md``."""
    lines = [
        "# Dtypes, devices and layouts",
        "",
        "Generated from `src/horovod/core/rules.py` by `python -m horovod.core.rules`; do not edit.",
        "",
        "## Dtypes",
        "",
        "`allgather`, `broadcast` and `alltoall` move every dtype of this table, in torch and in numpy where numpy",
        "has it. `allreduce` and `reducescatter` combine:",
        "",
        f"| dtype | bytes | {' | '.join(op.name.capitalize() for op in _ORDER)} | numpy | arithmetic |",
        f"|---|---|{'---|' * len(_ORDER)}---|---|",
        *(_row(dtype) for dtype in ITEMSIZE),
        "",
        "Any other dtype, such as the 8-bit floating-point ones, and an operation without a mark are a `ValueError`",
        "at the call. `reducescatter` has no Adasum. All ranks use one dtype; else every rank gets a `MismatchError`.",
        "",
        "The result has the dtype of the input. All ranks see the same bits. `prescale_factor` and `postscale_factor`",
        "multiply before and after the reduction: integers as float64 numbers, which are then cut off towards zero;",
        "floating-point numbers in their own dtype, 16-bit ones once and in float32 when they are added.",
        "",
        "## Shapes",
        "",
        "| operation | what ranks must share | dimensions |",
        "|---|---|---|",
        *(
            f"| `{kind.name.lower()}` | {_SHARED[row.rows_differ]} | {row.dimensions} |"
            for kind, row in COLLECTIVES.items()
        ),
        "",
        "A tensor may have no elements. Grouped operations take tensors of different shapes and dtypes.",
        "",
        "## Devices",
        "",
        "| tensors on | |",
        "|---|---|",
        "| CPU | yes; without a copy when they come from `hvd.zeros` or `hvd.empty` |",
        "| CUDA | yes, through pinned host memory; the copies overlap with what the GPU does next; where they are, with"
        " `HOROVOD_GPU_OPERATIONS=NCCL` or in a job of one rank |",
        "| any other device, `meta` | `ValueError` at the call |",
        "",
        "The tensors of one grouped operation are on one device (`RuntimeError`), and those of all ranks under one",
        "name on one kind of device (`MismatchError`).",
        "",
        "## Layouts",
        "",
        "| layout | |",
        "|---|---|",
        "| contiguous | yes |",
        "| strided, not contiguous | yes, through a contiguous copy; in-place operations write the result back |",
        "| sparse COO | `sparse_allreduce_async` and `DistributedOptimizer`; elsewhere `ValueError` |",
        "| other sparse layouts | `ValueError` at the call |",
        "| requires a gradient | yes; see the gradients in [torch.md](torch.md#gradients-of-the-operations) |",
    ]
    return "\n".join(lines) + "\n"


def _row(dtype: str) -> str:
    marks = " | ".join("x" if op in REDUCIBLE[dtype] else "" for op in _ORDER)
    numpy = "with ml_dtypes" if dtype == "bfloat16" else "x"
    return f"| {dtype} | {ITEMSIZE[dtype]} | {marks} | {numpy} | {_NOTES.get(dtype, _WHOLE)} |"


_SHARED = {False: "the whole shape", True: "all dimensions but the first"}


if __name__ == "__main__":
    print(markdown(), end="")
