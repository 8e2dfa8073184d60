"""The cases of the collective benchmarks: operation, size and expected result (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "DEFAULT_SIZES",
    "DTYPES",
    "FRAMEWORKS",
    "MODELS",
    "OPS",
    "PARTS",
    "PEERS",
    "Case",
    "format_seconds",
    "input_blocks",
    "output_blocks",
    "parse_bytes",
    "parse_sizes",
]

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")
PEERS = ("gloo", "mpich", "openmpi")
MODELS = ("mlp", "resnet", "gpt")
OPS = ("allreduce", "allreduce-new", "broadcast", "allgather", "alltoall", "reducescatter", "async")
PARTS = ("agree", "execute", "rest")
"""Parts of a call: until the execution begins (the other ranks arrive, the coordinator answers); the execution; Python
before and after."""
DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read ``64``, ``64K``, ``4MiB`` as a number of bytes (units of 1024).

    Raises:
        ValueError: the text is not a size, or is zero.
    """
    match = _SIZE.fullmatch(text.strip())
    nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if nbytes <= 0:
        raise ValueError(f"{text!r} is not a size; write for example 64, 64K, 4M or 1G")
    return nbytes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read ``64,64K,1M`` or a range ``64:256M`` (each four times the one before; both ends included)."""
    sizes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        nbytes, end = parse_bytes(first), parse_bytes(last or first)
        while nbytes < end:
            sizes.append(nbytes)
            nbytes *= 4
        sizes.append(end)
    return tuple(sizes)


DEFAULT_SIZES = parse_sizes("64,1K,16K,64K,256K,1M,4M,16M,64M,256M")


def format_seconds(seconds: float) -> str:
    """Write a duration with three digits: ``7.12 µs``, ``1.05 ms``, ``2.30 s``."""
    value, unit = seconds, "s"
    for factor, smaller in ((1e6, "µs"), (1e3, "ms")):
        if abs(seconds) * factor < 1000:
            value, unit = seconds * factor, smaller
            break
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"


@dataclass(frozen=True)
class Case:
    """One operation at one size."""

    op: str  # one of `OPS`
    nbytes: int  # bytes of one rank's input, before rounding up to a whole number of elements per rank
    dtype: str = "float32"  # a key of `DTYPES`
    batch: int = 1  # number of tensors in flight in one call (`async`); 1 otherwise

    def count(self, size: int) -> int:
        """Return the number of elements of one rank's input, a multiple of ``size`` so that every op can split it."""
        count = max(1, self.nbytes // DTYPES[self.dtype])
        return -(-count // size) * size

    def memory_bytes(self, size: int) -> int:
        """Return the bytes that one contender holds on one rank: input and output."""
        nbytes = self.count(size) * DTYPES[self.dtype] * self.batch
        return nbytes * (1 + size) if self.op == "allgather" else 2 * nbytes


def input_blocks(op: str, rank: int, size: int) -> list[int]:
    """Return the values of the input on ``rank``, which has equal blocks, each filled with one value."""
    if op == "alltoall":
        return [(rank * size + peer) % 100 for peer in range(size)]
    if op == "broadcast":
        return [7 if rank == 0 else 0]
    return [rank + 1]


def output_blocks(op: str, rank: int, size: int) -> list[int]:
    """Return the expected values of the output on ``rank``, by equal blocks."""
    if op == "alltoall":
        return [(peer * size + rank) % 100 for peer in range(size)]
    if op == "broadcast":
        return [7]
    if op == "allgather":
        return [peer + 1 for peer in range(size)]
    return [size * (size + 1) // 2]
