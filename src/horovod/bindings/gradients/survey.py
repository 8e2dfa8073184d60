"""Exchange between ranks before buckets are planned: existence, kind and order of gradients."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod import context
from horovod.bindings.agreement import agree_on_names
from horovod.bindings.fingerprints import warn_of_other_values
from horovod.bindings.gradients.adapter import GradientAdapter, GradSlot
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.runtime import comm

__all__ = ["Survey", "survey"]

_ABSENT, _DENSE, _SPARSE = 0, 1, 2
_HEADER = 2
_SAME_MODEL = (
    "Dtypes, shapes, memory layouts and order must be the same, too. Make the same model, and the optimizer with the "
    "same named_parameters, on every rank."
)

_AT_FIRST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step"
_AFTER_JOIN = (
    "hvd.broadcast_parameters(model.state_dict(), last) and hvd.broadcast_optimizer_state(optimizer, last) after "
    "last = hvd.join(): the other ranks have taken fewer steps"
)


@dataclass(frozen=True)
class Survey:
    """Result of the exchange, the same on all ranks."""

    # all slots in the order of their gradients on the first rank; slots without a gradient there come last
    order: tuple[GradSlot, ...]
    kinds: dict[int, frozenset[int]]  # for each parameter's id, the kinds of its gradient on the ranks

    def seen(self, slot: GradSlot) -> bool:
        """Whether any rank had a gradient."""
        return self.kinds[id(slot.parameter)] != {_ABSENT}

    def sparse_dim(self, slot: GradSlot) -> int:
        """Return the number of sparse dimensions; 0 if any rank had a dense gradient."""
        kinds = self.kinds[id(slot.parameter)] - {_ABSENT}
        return max(kinds) - _SPARSE if kinds and _DENSE not in kinds else 0


def survey(slots: Sequence[GradSlot], name: str, settings: ReduceSettings, adapter: GradientAdapter) -> Survey:
    """Exchange the properties of ``slots`` with the other ranks.

    Raises:
        MismatchError: the ranks' parameters differ; on every rank.
    """
    descriptions = [f"{slot.name}, {adapter.describe(slot.parameter)}" for slot in slots]
    signature = zlib.crc32("\n".join(descriptions).encode(errors="surrogatepass"))
    kinds_here = [_kind(slot, adapter) for slot in slots]
    values = [adapter.fingerprint(slot.parameter) if kind else 0 for slot, kind in zip(slots, kinds_here, strict=True)]
    row = [len(slots), signature, *kinds_here, *(slot.arrival for slot in slots), *values]
    gathered = comm.allgather(np.array(row, np.int64), name=f"{name}.survey", process_set=settings.process_set).tolist()
    rows = []
    while gathered:
        length = _HEADER + 3 * gathered[0]
        rows.append(gathered[:length])
        gathered = gathered[length:]
    if len({tuple(found[:_HEADER]) for found in rows}) > 1:
        # Send the long descriptions only when they differ; this raises the error.
        numbered = [f"{number}. {text}" for number, text in enumerate(descriptions, 1)]
        agree_on_names("DistributedOptimizer", numbered, settings.process_set, _SAME_MODEL)
    count = len(slots)
    arrivals = rows[0][_HEADER + count : _HEADER + 2 * count]
    if settings.process_set.rank() == 0:
        _warn_of_other_values(rows, slots, settings)
    # Slots without an arrival go in reverse order: backward reaches the last parameters first.
    positions = sorted(range(count), key=lambda i: (arrivals[i] < 0, arrivals[i] if arrivals[i] >= 0 else -i))
    kinds = {id(slot.parameter): frozenset(found[_HEADER + i] for found in rows) for i, slot in enumerate(slots)}
    return Survey(tuple(slots[i] for i in positions), kinds)


def _kind(slot: GradSlot, adapter: GradientAdapter) -> int:
    if adapter.gradient(slot.parameter) is None:
        return _ABSENT
    sparse = adapter.sparse_dim(slot.parameter)
    return _SPARSE + sparse if sparse else _DENSE


def _warn_of_other_values(rows: Sequence[Sequence[int]], slots: Sequence[GradSlot], settings: ReduceSettings) -> None:
    """Warn about parameters that differ between ranks that have a gradient for them: they were not broadcast."""
    count, names, others = len(slots), [], set()
    for i, slot in enumerate(slots):
        found = {place: row[_HEADER + 2 * count + i] for place, row in enumerate(rows) if row[_HEADER + i] != _ABSENT}
        first = next(iter(found.values()), 0)
        if differing := [place for place, value in found.items() if value != first]:
            names.append(slot.name)
            others.update(differing)
    if names:
        remedy = _AFTER_JOIN if context.join_count() else _AT_FIRST
        warn_of_other_values(names, sorted(others), len(rows), settings.process_set, remedy)
