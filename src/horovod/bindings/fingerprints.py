"""Check that the ranks train the same model: compare fingerprints of parameters once, in the first step."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from horovod import context
from horovod.bindings.process_sets import ProcessSet, key_of
from horovod.bindings.runtime import comm
from horovod.logs import logger
from horovod.phrases import few

__all__ = ["compare_once", "digest", "fingerprint", "warn_of_other_values"]

#: Number of elements compared per parameter: enough to detect a model that was not broadcast.
_LOOK_AT = 1024
#: Bytes per row; ``digest`` adds the rows up.
_ROW = 1 << 15
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_compared: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def fingerprint(array: Any) -> int:
    """Return a number that depends only on the bits of an array's first values."""
    first = np.ascontiguousarray(array.reshape(-1)[:_LOOK_AT])
    width = first.dtype.itemsize
    bits = first.view(_INTEGERS[width]) if width in _INTEGERS else first.view(np.uint64)
    return int(bits.astype(np.uint64).sum(dtype=np.uint64).view(np.int64))


def compare_once(
    name: str, names: Sequence[str], arrays: Callable[[], Sequence[Any]], remedy: str, process_set: ProcessSet,
    warn: Callable[..., None] = logger.warning,
) -> None:  # fmt: skip
    """Compare parameters across ranks, at the first call with ``name`` and ``names`` in a job.

    The first member warns, or logs, if they differ because they were not broadcast, and recommends the ``remedy``.
    After a join() nothing is compared: a rank with less data may then make its first call when the others have made
    theirs already.

    Raises:
        MismatchError: ranks have different numbers of parameters.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks at the first call until all members called.
    """
    done = _compared.setdefault(context.engine(), set())
    key = (name, tuple(names), key_of(process_set))
    # In an elastic job new ranks would compare alone; there the state synchronizes the values.
    if key in done or context.join_count() or context.is_elastic():
        return
    done.add(key)
    own = np.array([[fingerprint(array) for array in arrays()]], np.int64)
    table = comm.allgather(own, name=f"{name}.parameters", process_set=process_set)
    differs = table != table[0]
    if process_set.rank() == 0 and differs.any():
        found = [name for name, other in zip(names, differs.any(axis=0), strict=True) if other]
        places, remedy = np.flatnonzero(differs.any(axis=1)).tolist(), f"{remedy} before the first step"
        warn_of_other_values(found, places, len(table), process_set, remedy, warn)


def warn_of_other_values(
    names: Sequence[str], places: Iterable[int], count: int, process_set: ProcessSet, remedy: str,
    warn: Callable[..., None] = logger.warning,
) -> None:  # fmt: skip
    """Warn that parameters differ on the ranks at these places among ``count`` answers; recommend the ``remedy``."""
    ranks = process_set.ranks or []
    members = ranks if len(ranks) == count else range(count)  # indices from 0 if some members are missing
    warn(
        "the ranks train different models: %s began this step with other values on %s. Call %s",
        few(names),
        ", ".join(f"rank {members[place]}" for place in places),
        remedy,
    )


def digest(arrays: Iterable[Any]) -> str:
    """Return a hash of arrays' bits, in little more time than reading them takes."""
    whole = hashlib.blake2b(digest_size=16)
    for array in arrays:
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole.update(f"{array.dtype}{array.shape}".encode())
        # Add rows up first: a sum reads memory faster than the hash does.
        end = len(words) // _ROW * _ROW
        if end:
            whole.update(words[:end].view(np.uint64).reshape(-1, _ROW // 8).sum(0, dtype=np.uint64).data)
        whole.update(words[end:].data)
    return whole.hexdigest()
