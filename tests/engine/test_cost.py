"""How much Python a small collective is made of: counted, because time says nothing on a busy machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from interleaving import Stage
from pairs import Ranks, on_stage

import horovod

_HOME = str(Path(horovod.__file__).parent)
_CALLS = 50


def _count(ranks: Ranks, rank: int) -> float:
    """Return how many functions of this package a synchronous allreduce of a few bytes calls on a rank."""
    called = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal called
        called += event == "call" and frame.f_code.co_filename.startswith(_HOME)

    for number in range(2 * _CALLS):
        if number == _CALLS:
            sys.setprofile(profile)
        ranks.run(rank, "x")
    sys.setprofile(None)
    return called / _CALLS


def test_a_small_allreduce_calls_few_functions() -> None:
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage({}, frozenset())
        on_stage(stage, patch, looks=2)
        ranks = Ranks(stage, 2)
        try:
            counts = [actor.result for actor in stage.play(lambda: _count(ranks, 0), lambda: _count(ranks, 1))]
            ranks.stop()
        finally:
            stage.close()
    # Where there are more, something that could be worked out once is done in every call.
    assert 20 < counts[0] < 67, counts
    assert 20 < counts[1] < 54, counts
