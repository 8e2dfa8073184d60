"""What the ranks tell each other about their gradients before buckets are planned."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from horovod.errors import MismatchError
from horovod.torch.buckets import Settings, Slot
from horovod.torch.optimizer_state import dense_stride
from horovod.torch.runtime import comm

__all__ = ["Survey", "survey"]

_ABSENT, _DENSE, _SPARSE = 0, 1, 2
_HEADER = 2


@dataclass(frozen=True)
class Survey:
    """The common answer.

    Attributes:
        order: all slots, as their gradients came on the first rank; those that did not come there last.
        kinds: what the ranks said about each, by the parameter's id.
        sparse_as_dense: whether sparse gradients travel as dense ones.
    """

    order: tuple[Slot, ...]
    kinds: dict[int, frozenset[int]]
    sparse_as_dense: bool

    def seen(self, slot: Slot) -> bool:
        """Whether any rank had a gradient."""
        return self.kinds[id(slot.parameter)] != {_ABSENT}

    def sparse_dim(self, slot: Slot) -> int:
        """Return the number of sparse dimensions; 0 where any rank had a dense gradient."""
        kinds = self.kinds[id(slot.parameter)] - {_ABSENT}
        return max(kinds) - _SPARSE if kinds and _DENSE not in kinds else 0

    def travels_sparse(self, slot: Slot) -> bool:
        """Whether the gradient is gathered instead of reduced."""
        return self.sparse_dim(slot) > 0 and not self.sparse_as_dense


def survey(slots: Sequence[Slot], name: str, settings: Settings) -> Survey:
    """Exchange what is known about ``slots``.

    Raises:
        MismatchError: the ranks' parameters differ; on every rank.
    """
    signature = zlib.crc32("\n".join(_describe(slot) for slot in slots).encode())
    row = [len(slots), signature, *(_kind(slot) for slot in slots), *(slot.arrival for slot in slots)]
    gathered = comm.allgather(torch.tensor(row), name=f"{name}.survey", process_set=settings.process_set).tolist()
    rows = []
    while gathered:
        length = _HEADER + 2 * gathered[0]
        rows.append(gathered[:length])
        gathered = gathered[length:]
    if len({tuple(found[:_HEADER]) for found in rows}) > 1:
        raise MismatchError(_difference(rows, slots, settings))
    count = len(slots)
    arrivals = rows[0][_HEADER + count :]
    # Backward meets the last parameters first.
    positions = sorted(range(count), key=lambda i: (arrivals[i] < 0, arrivals[i] if arrivals[i] >= 0 else -i))
    kinds = {id(slot.parameter): frozenset(found[_HEADER + i] for found in rows) for i, slot in enumerate(slots)}
    return Survey(tuple(slots[i] for i in positions), kinds, settings.sparse_as_dense)


def _describe(slot: Slot) -> str:
    parameter = slot.parameter
    return f"{slot.name} {parameter.dtype} {tuple(parameter.shape)} {dense_stride(parameter)}"


def _kind(slot: Slot) -> int:
    grad = slot.parameter.grad
    if grad is None:
        return _ABSENT
    return _DENSE if grad.layout is torch.strided else _SPARSE + grad.sparse_dim()


def _difference(rows: Sequence[Sequence[int]], slots: Sequence[Slot], settings: Settings) -> str:
    ranks = settings.process_set.ranks or []
    told = ", ".join(
        f"rank {ranks[i] if len(ranks) == len(rows) else i}: {row[0]} parameters (checksum {row[1]:08x})"
        for i, row in enumerate(rows)
    )
    own = "; ".join(_describe(slot) for slot in slots[:8])
    return (
        "DistributedOptimizer needs parameters of the same names, dtypes, shapes and memory layouts, in the same "
        f"order, on every rank. Received from {told}. Here they are: {own}{'; ...' if len(slots) > 8 else ''}"
    )
