"""Callbacks that keep a state up to date, driven as ``fit`` drives them; no Keras."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from horovod._keras.elastic_callbacks import (
    CommitStateCallback,
    EpochIsOver,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from horovod.errors import HostsUpdatedInterrupt


def _fit(state: Any, epochs: int, steps: int, per_commit: int) -> None:
    """Do what ``fit`` does; ``state.trained`` gets each batch."""
    model = SimpleNamespace(stop_training=False)
    callbacks: list[Any] = [
        UpdateEpochStateCallback(state),
        UpdateBatchStateCallback(state),
        CommitStateCallback(state, per_commit),
    ]

    def tell(event: str, *args: Any) -> None:
        for callback in callbacks:
            getattr(callback, event, lambda *_: None)(*args)

    for callback in callbacks:
        callback.model, callback.params = model, {"steps": steps}
    tell("on_train_begin")
    for epoch in range(state.epoch, epochs):
        tell("on_epoch_begin", epoch)
        for batch in range(steps):
            state.trained += 1
            tell("on_train_batch_end", batch)
            if isinstance(model.stop_training, EpochIsOver):
                break
        tell("on_epoch_end", epoch)


@pytest.mark.parametrize("per_commit", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_interrupt_at_any_commit_adds_no_batch_and_loses_none(steps: int, per_commit: int) -> None:
    epochs = 3
    for interrupts in range(1, 2 + epochs * (1 + steps)):
        commits = 0

        def commit(at: int = interrupts) -> None:
            nonlocal commits
            commits += 1
            if commits % at == 0:
                raise HostsUpdatedInterrupt

        state = SimpleNamespace(epoch=0, batch=0, trained=0, commit=commit)
        for _ in range(100):
            with contextlib.suppress(HostsUpdatedInterrupt):
                _fit(state, epochs, steps, per_commit)
        assert (state.trained, state.epoch, state.batch) == (epochs * steps, epochs, 0)
