"""Random plans of collectives: the same on every rank from one seed, with what numpy says each must give."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Step", "expected", "make_plan", "values"]

KINDS = ["allreduce", "allreduce_", "grouped", "allgather", "broadcast", "broadcast_", "alltoall", "reducescatter"]
DTYPES = ["float32", "float32", "float64", "float16", "int32", "int64", "uint8", "int8", "bool", "complex64"]
REDUCING = ("allreduce", "allreduce_", "grouped", "reducescatter")


@dataclass(frozen=True)
class Step:
    """One collective.

    Attributes:
        number: names it, and seeds its data.
        kind: one of ``KINDS``, or "barrier".
        dtype: of all its tensors.
        shapes: one per tensor of a group.
        op: name of the reduction.
        root: index of a broadcast's root in ``group``.
        group: the ranks that take part, ascending.
        where: "heap" or "arena".
        unnamed: whether it is matched by order; such a one is synchronous.
    """

    number: int
    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    op: str
    root: int
    group: tuple[int, ...]
    where: str
    unnamed: bool


def make_plan(seed: int, length: int, size: int, groups: list[tuple[int, ...]]) -> list[Step]:
    """Return ``length`` random steps over ``groups`` of the ``size`` ranks."""
    rng = random.Random(seed)
    plan = []
    for number in range(length):
        kind = rng.choice([*KINDS, "allreduce", "allreduce_", "barrier"])
        dtype = rng.choice(DTYPES)
        ops = ["Sum", "Sum", "Average", "Min", "Max", "Product"]
        if dtype == "bool":
            ops = ["Sum", "Min", "Max", "Product"]
        elif dtype == "complex64":
            ops = ["Sum", "Average", "Product"]
        group = rng.choice(groups)
        shapes = tuple(_shape(rng, kind) for _ in range(rng.randrange(1, 5) if kind == "grouped" else 1))
        plan.append(
            Step(
                number,
                kind,
                dtype,
                shapes,
                rng.choice(ops),
                rng.randrange(len(group)),
                group,
                rng.choice(["heap", "heap", "arena"]),
                kind == "barrier" or rng.random() < 0.1,
            )
        )
    return plan


def _shape(rng: random.Random, kind: str) -> tuple[int, ...]:
    draw = rng.random()
    if draw < 0.02:
        first = rng.randrange(300_000, 700_000)  # several staging rounds
    elif draw < 0.08:
        first = rng.randrange(30_000, 60_000)  # does not ride in the request
    elif draw < 0.15:
        first = 0
    else:
        first = rng.randrange(1, 40)
    if kind in ("allreduce", "allreduce_", "grouped", "broadcast", "broadcast_") and rng.random() < 0.1:
        return ()
    return (first,) if first > 1000 or rng.random() < 0.6 else (first, rng.randrange(4))


def values(step: Step, member: int, tensor: int = 0) -> Any:
    """Return what the ``member``-th of a step's group brings: small numbers, exact under every reduction."""
    rows = step.shapes[tensor]
    if step.kind == "allgather":
        rows = (rows[0] * (member + 1) // 2, *rows[1:])
    elif step.kind == "alltoall":
        rows = (sum(splits(step, member)), *rows[1:])
    count = int(np.prod(rows, dtype=np.int64))
    base = (np.arange(count, dtype=np.int64) * 7 + step.number * 5 + member * 3 + tensor) % 4
    if step.dtype == "bool":
        base = base > 1
    elif step.dtype not in ("uint8", "bool"):
        base = base - 1
    return base.astype(step.dtype).reshape(rows)


def splits(step: Step, member: int) -> list[int]:
    """Return how many rows the ``member``-th sends to each."""
    return [(step.shapes[0][0] + member + 2 * other) % (step.shapes[0][0] + 1) for other in range(len(step.group))]


def expected(step: Step, member: int) -> list[Any]:
    """Return what the ``member``-th must receive, one array per tensor."""
    parts = len(step.group)
    if step.kind in REDUCING:
        results = [_reduced(step, tensor) for tensor in range(len(step.shapes))]
        if step.kind != "reducescatter":
            return results
        base, extra = divmod(step.shapes[0][0], parts)
        start = member * base + min(member, extra)
        return [results[0][start : start + base + (member < extra)]]
    if step.kind == "allgather":
        return [np.concatenate([values(step, other) for other in range(parts)])]
    if step.kind in ("broadcast", "broadcast_"):
        return [values(step, step.root)]
    if step.kind == "alltoall":
        pieces = []
        for other in range(parts):
            counts = splits(step, other)
            start = sum(counts[:member])
            pieces.append(values(step, other)[start : start + counts[member]])
        return [np.concatenate(pieces)]
    return []


def _reduced(step: Step, tensor: int) -> Any:
    stack = np.stack([values(step, member, tensor) for member in range(len(step.group))])
    if step.dtype == "bool":
        return stack.any(0) if step.op in ("Sum", "Max") else stack.all(0)
    if step.op == "Average":
        exact = stack.astype(np.complex128 if step.dtype == "complex64" else np.float64).sum(0) / len(step.group)
        return exact if step.dtype.startswith(("float", "complex")) else np.trunc(exact)
    return {"Sum": stack.sum, "Min": stack.min, "Max": stack.max, "Product": stack.prod}[step.op](
        0, **({"dtype": step.dtype} if step.op in ("Sum", "Product") else {})
    )
