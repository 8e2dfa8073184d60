"""The engine needs nobody who observes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import run_ranks

from horovod.engine.engine import Engine
from horovod.errors import PeerLostError


def _unobserved() -> str:
    import horovod.numpy as hvd
    from horovod import context

    context.Engine = lambda link, settings, observer: Engine(link, settings)  # type: ignore[assignment,misc]
    try:
        hvd.init()
        total: Any = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
        assert total.tolist() == [3.0] * 3
        large: Any = hvd.allgather(np.full((1000, 100), float(hvd.rank())), name="large")
        assert large.sum() == 1e5
        assert hvd.join() in (0, 1)
        if hvd.rank() == 0:
            hvd.shutdown()
            return ""
        with pytest.raises(PeerLostError) as caught:
            hvd.barrier()
        return str(caught.value)
    finally:
        context.Engine = Engine  # type: ignore[misc]


def test_an_engine_works_without_an_observer_and_its_errors_are_the_same() -> None:
    _, text = run_ranks(2, _unobserved, init=False)
    assert "rank 0" in text and "while rank 1 waited in barrier" in text
