"""Whether the ranks train the same model: fingerprints of parameters, compared once in the first step."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from horovod import context
from horovod.bindings.collectives import Collectives
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.bindings.process_sets import ProcessSet
from horovod.logs import logger
from horovod.phrases import few

__all__ = ["compare_once", "digest", "fingerprint"]

#: Number of elements of each parameter that are compared: a model that was not broadcast differs there already.
_LOOK_AT = 1024
#: Bytes that ``digest`` adds to each other.
_ROW = 1 << 15
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_comm = Collectives(NumpyAdapter())
_compared: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def fingerprint(array: Any) -> int:
    """Return a number for the first values of an array, the same wherever these have the same bits.

    Args:
        array: of numpy; of any dtype.
    """
    first = np.ascontiguousarray(array.reshape(-1)[:_LOOK_AT])
    width = first.dtype.itemsize
    bits = first.view(_INTEGERS[width]) if width in _INTEGERS else first.view(np.uint64)
    return int(bits.astype(np.uint64).sum(dtype=np.uint64).view(np.int64))


def compare_once(
    name: str, names: Sequence[str], arrays: Callable[[], Sequence[Any]], remedy: str, process_set: ProcessSet,
    warn: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """Compare parameters over the ranks, the first time that this is called for ``name`` and ``names`` in a job.

    The first member warns if they differ because they were not broadcast. After a join() nothing is compared: ranks
    that had less data may call for the first time then, when the others have called before.

    Args:
        name: key of the match.
        names: of the parameters; how many there are is the same on all ranks.
        arrays: gives the parameters as numpy arrays.
        remedy: what to call, and on what.
        process_set: ranks that take part.
        warn: takes the warning instead of the log.

    Raises:
        MismatchError: ranks have different numbers of parameters.
        PeerLostError: a rank died.

    Blocks, the first time, until all members called.
    """
    done = _compared.setdefault(context.engine(), set())
    key = (name, tuple(names), process_set.process_set_id)
    # In an elastic job newcomers would compare what the others have compared before; there the state brings the values.
    if key in done or context.join_count() or context.is_elastic():
        return
    done.add(key)
    own = np.array([[fingerprint(array) for array in arrays()]], np.int64)
    table = _comm.allgather(own, name=f"{name}.parameters", process_set=process_set)
    differs = table != table[0]
    if process_set.rank() == 0 and differs.any():
        ranks = process_set.ranks or []
        members = ranks if len(ranks) == len(table) else range(len(table))
        (warn or logger.warning)(
            "the ranks train different models: %s began this step with other values on %s. Call %s before the first "
            "step, and after join()",
            few([found for found, other in zip(names, differs.any(axis=0), strict=True) if other]),
            ", ".join(f"rank {members[place]}" for place in np.flatnonzero(differs.any(axis=1))),
            remedy,
        )


def digest(arrays: Iterable[Any]) -> str:
    """Return a text that is the same for arrays with the same bits, and takes little more time than to read them.

    Args:
        arrays: of numpy; of any dtype.
    """
    whole = hashlib.blake2b(digest_size=16)
    for array in arrays:
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole.update(f"{array.dtype}{array.shape}".encode())
        # Rows are added up, so that a fast sum reads what a slow hash would.
        end = len(words) // _ROW * _ROW
        if end:
            whole.update(words[:end].view(np.uint64).reshape(-1, _ROW // 8).sum(0, dtype=np.uint64).data)
        whole.update(words[end:].data)
    return whole.hexdigest()
