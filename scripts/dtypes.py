"""Print docs/dtypes.md, from the rules of the engine: ``python scripts/dtypes.py > docs/dtypes.md``."""

from __future__ import annotations

from horovod.core.collectives import COLLECTIVES, REDUCIBLE
from horovod.core.requests import ITEMSIZE, Kind, ReduceOp

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
_SHARED = {False: "the whole shape", True: "all dimensions but the first"}
_LEAST = {False: "any number", True: "one or more"}
_DIMENSIONS = {
    Kind.ALLTOALL: "one or more; the first divides evenly, or `splits` add up to it",
    Kind.REDUCESCATTER: "one or more; the first ranks get a row more where it does not divide",
}


def markdown() -> str:
    """The page ``docs/dtypes.md``."""
    lines = [
        "# Dtypes, devices and layouts",
        "",
        "Generated from `src/horovod/core/collectives.py` by `python scripts/dtypes.py`; do not edit.",
        "",
        "## Dtypes",
        "",
        f"{_named(reduces=False)} move every dtype of this table, in torch and in numpy where numpy has it.",
        f"{_named(reduces=True)} combine:",
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
        "floating-point numbers in their own dtype, 16-bit ones once and in float32 when they are added. An average,",
        "or a sum with a `postscale_factor`, does not wrap around on the way; on several hosts, 64-bit integers",
        "so large that their sum could be out of range are a `HorovodInternalError`.",
        "",
        "## Shapes",
        "",
        "| operation | what ranks must share | dimensions |",
        "|---|---|---|",
        *(
            f"| `{kind.name.lower()}` | {_SHARED[row.rows_differ]} | {_DIMENSIONS.get(kind, _LEAST[row.has_rows])} |"
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


def _named(*, reduces: bool) -> str:
    *others, last = [f"`{kind.name.lower()}`" for kind, row in COLLECTIVES.items() if row.reduces is reduces]
    return f"{', '.join(others)} and {last}"


def _row(dtype: str) -> str:
    marks = " | ".join("x" if op in REDUCIBLE[dtype] else "" for op in _ORDER)
    numpy = "with ml_dtypes" if dtype == "bfloat16" else "x"
    return f"| {dtype} | {ITEMSIZE[dtype]} | {marks} | {numpy} | {_NOTES.get(dtype, _WHOLE)} |"


if __name__ == "__main__":
    print(markdown(), end="")
