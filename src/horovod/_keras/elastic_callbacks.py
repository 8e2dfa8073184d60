"""Callbacks that keep a state up to date in ``fit``, for both Keras 3 and tf_keras.

Scripts pass ``fit`` either the number of remaining epochs, or ``initial_epoch=state.epoch``; both work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod._keras.unsafe import end_epoch_of_data
from horovod.bindings.misuse import wrong_argument

__all__ = ["CommitStateCallback", "EpochIsOver", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]


class EpochIsOver:
    """A true value for ``model.stop_training`` that ends only the epoch, not the training."""

    @classmethod
    def declare(cls, model: Any) -> None:
        """End the epoch after this batch, unless training ends anyway."""
        if not model.stop_training:
            model.stop_training = cls()

    @classmethod
    def revoke(cls, model: Any) -> None:
        """Let training continue, unless a callback has stopped it meanwhile."""
        if isinstance(model.stop_training, cls):
            model.stop_training = False
            end_epoch_of_data()


class CommitStateCallback:
    """Commits the state after every ``batches_per_commit`` batches, and at the end of each epoch.

    The last batch of an epoch is committed with the epoch: otherwise a ``fit`` after a reset would do one batch more.
    Put this callback after those that change the state.

    Args:
        state: the state to commit.
        batches_per_commit: number of batches between commits.

    Raises:
        RequestError: ``batches_per_commit`` is less than 1.
    """

    model: Any
    params: Mapping[str, Any] | None

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise wrong_argument(f"batches_per_commit must be 1 or more. Received: {batches_per_commit}")
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Restart the count of batches."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if enough batches were done and this is not the last one of the epoch."""
        self.batches_remaining -= 1
        steps = (self.params or {}).get("steps")
        is_last = isinstance(self.model.stop_training, EpochIsOver) or (steps and batch + 1 >= steps)
        if self.batches_remaining <= 0 and not is_last:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit the state."""
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback:
    """Keeps ``state.batch``, the number of batches done in the epoch.

    A ``fit`` that begins in the middle of an epoch does its remaining batches, and then whole epochs.

    Args:
        state: the state to update.
    """

    model: Any
    params: Mapping[str, Any] | None

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Record the number of batches done before."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch; end the epoch after its last batch."""
        self.state.batch = done = self._before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._before and steps and done >= steps:
            EpochIsOver.declare(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reset the count of batches to 0."""
        EpochIsOver.revoke(self.model)
        self.state.batch = self._before = 0


class UpdateEpochStateCallback:
    """Keeps ``state.epoch``, the number of epochs done.

    Args:
        state: the state to update.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch
        self._first: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Record the number of epochs done before."""
        self.initial_epoch, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Detect whether ``fit`` counts from 0 or from ``state.epoch``."""
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self.state.epoch = self.initial_epoch + epoch - (self._first or 0) + 1
