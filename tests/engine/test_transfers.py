"""Tensors of a device go back when every rank has done its part; a failed transfer fails alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from horovod import config
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.core.requests import Kind
from horovod.engine.calls import call
from horovod.engine.engine import Engine
from horovod.engine.handles import Handle
from horovod.links import local
from horovod.transports.base import Entry, Work
from horovod.transports.local import LocalTransport

FENCE = 7


class _Unsettled(LocalTransport):
    """Other ranks write the results, and are not through before they are told."""

    others_are_through = False

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], notes: tuple[int, ...]) -> int:
        super().run(sequence, batch, notes)
        return FENCE

    def settled(self, members: Sequence[int], fence: int) -> bool:
        assert fence == FENCE
        return self.others_are_through


class _Transfer:
    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self._error = error

    def before(self) -> None:
        self.events.append("before")

    def after(self, outputs: Sequence[Any]) -> None:
        self.events.append(f"after {outputs[0].tolist()}")
        if self._error is not None:
            raise self._error


@pytest.fixture
def engine() -> Iterator[Engine]:
    settings = config.load({})
    made = Engine(replace(local.assemble(settings), transport=_Unsettled()), settings)
    made.start()
    yield made
    made.stop("the end")


def _submit(engine: Engine, transfer: _Transfer) -> Handle:
    values = np.ones(2)
    return engine.submit(call(Kind.ALLREDUCE, "x"), NumpyAdapter(), [values], [values], transfer)


def test_results_that_others_still_write_do_not_go_back_yet(engine: Engine) -> None:
    transfer, values = _Transfer(), np.ones(2)
    handle = engine.run(call(Kind.ALLREDUCE, "x"), NumpyAdapter(), [values], [values], transfer, limit_s=0.05)
    assert not handle.done
    assert transfer.events == ["before"]
    engine.transport.others_are_through = True  # type: ignore[attr-defined]
    engine.wait(handle)
    assert transfer.events == ["before", "after [1.0, 1.0]"]


def test_what_fails_on_the_way_back_fails_alone(engine: Engine) -> None:
    engine.transport.others_are_through = True  # type: ignore[attr-defined]
    handle = _submit(engine, _Transfer(RuntimeError("out of memory on the device")))
    with pytest.raises(RuntimeError, match="out of memory on the device"):
        engine.wait(handle)
    engine.wait(_submit(engine, _Transfer()))
