"""Python objects between ranks, without any framework."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks

import horovod.numpy as hvd
from horovod.errors import RequestError


@on_ranks(4)
def test_objects_of_all_ranks_through_numpy() -> None:
    rank, size = hvd.rank(), hvd.size()
    odd = [n for n in range(size) if n % 2]
    ours = {"rank": rank, "twice": lambda x: 2 * x, "values": np.arange(rank + 1)}
    root = hvd.broadcast_object(ours if rank == 1 else None, root_rank=1, name="settings")
    assert (root["rank"], root["twice"](4), root["values"].tolist()) == (1, 8, [0, 1])
    assert (root is ours) == (rank == 1)
    assert hvd.broadcast_object(None) is None
    assert hvd.allgather_object("x" * rank) == ["x" * n for n in range(size)]
    group = hvd.add_process_set(odd)
    if rank in odd:
        assert hvd.allgather_object(rank, process_set=group) == odd
        assert hvd.broadcast_object(rank, odd[-1], process_set=group) == odd[-1]
    large = b"a" * 3_000_000
    assert hvd.broadcast_object(large) == large


@on_ranks(2)
def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank() -> None:
    rank, lock = hvd.rank(), threading.Lock()
    texts = []
    attempts: list[Any] = [
        lambda: hvd.broadcast_object(lock, root_rank=1),
        lambda: hvd.allgather_object(lock if rank == 1 else 5),
    ]
    for attempt in attempts:
        with pytest.raises(RequestError) as caught:
            attempt()
        texts.append(str(caught.value))
        assert isinstance(caught.value.__cause__, TypeError) == (rank == 1)
    # The ranks are in step still.
    assert hvd.allgather_object(rank) == list(range(hvd.size()))
    for text in texts:
        assert text.startswith("rank 1 cannot pickle its object: TypeError: cannot pickle '_thread.lock'")
        assert "test_objects.py:" in text


class _Loads:
    """An object that one rank cannot load."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return _load, (self.rank,)

    def __repr__(self) -> str:
        return "loads"


def _load(rank: int) -> int:
    if rank == hvd.rank():
        raise ModuleNotFoundError("No module named 'elsewhere'")
    return rank


def _outcome(attempt: Callable[[], Any]) -> str:
    try:
        return repr(attempt())
    except RequestError as error:
        assert isinstance(error.__cause__, ModuleNotFoundError)
        return str(error)


def _unloadable() -> list[str]:
    rank = hvd.rank()
    return [
        _outcome(lambda: hvd.broadcast_object(_Loads(0) if rank == 1 else None, root_rank=1)),
        _outcome(lambda: hvd.allgather_object(_Loads(0) if rank == 1 else 5)),
        str(hvd.allgather_object(rank)),  # the ranks are in step still
    ]


def test_an_object_that_a_rank_cannot_load_is_an_error_that_names_both_ranks() -> None:
    failed, loaded = run_ranks(2, _unloadable)
    for text in failed[:2]:
        assert text.startswith(
            "rank 0 cannot unpickle the object of rank 1: ModuleNotFoundError: No module named 'elsewhere' (at "
        )
        assert "test_objects.py:" in text
    assert loaded == ["loads", "[5, 0]", "[0, 1]"]
    assert failed[2] == "[0, 1]"


@on_ranks(2)
def test_a_function_from_another_version_of_python_is_an_error() -> None:
    """Running its bytecode would crash."""
    rank, text = hvd.rank(), ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(sys.implementation, "cache_tag", "cpython-399")
        try:
            hvd.broadcast_object((lambda: 1) if rank == 0 else None)
        except RequestError as error:
            text = str(error)
    refused = "rank 1 cannot unpickle the object of rank 0: LaunchError: the function was sent from Python"
    assert text.startswith(refused) if rank == 1 else not text
    assert hvd.allgather_object(rank) == [0, 1]  # the ranks are in step still


def test_objects_need_no_framework() -> None:
    code = "import horovod.numpy as h, sys; h.init(); h.broadcast_object(1); h.allgather_object(1); h.shutdown()"
    check = "assert not {'torch', 'tensorflow', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True, timeout=300)
