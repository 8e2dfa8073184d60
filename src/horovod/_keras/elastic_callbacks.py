"""The callbacks that keep a state up to date in ``fit``, for Keras 3 and tf_keras alike.

Scripts give ``fit`` either the number of epochs that are left, or ``initial_epoch=state.epoch``; both are understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod.bindings.misuse import wrong_argument

__all__ = ["CommitState", "EpochIsOver", "UpdateBatchState", "UpdateEpochState"]


class EpochIsOver:
    """Stands for true in ``model.stop_training`` where an epoch is to end, and training is to go on after it."""

    @classmethod
    def declare(cls, model: Any) -> None:
        """End the epoch after this batch, unless training ends in any case."""
        if not model.stop_training:
            model.stop_training = cls()

    @classmethod
    def revoke(cls, model: Any) -> None:
        """Go on with training; a callback may have decided otherwise meanwhile."""
        if isinstance(model.stop_training, cls):
            model.stop_training = False


class CommitState:
    """Commits the state after every so many batches, and at the end of each epoch.

    The last batch of an epoch is committed with the epoch: otherwise a ``fit`` after a reset would do one batch more.
    Put this callback behind those that change the state.

    Args:
        state: what to commit.
        batches_per_commit: how many batches.

    Raises:
        RequestError: that is no positive number.
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
        """Count anew."""
        del logs
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time to."""
        del logs
        self.batches_remaining -= 1
        steps = (self.params or {}).get("steps")
        is_last = isinstance(self.model.stop_training, EpochIsOver) or (steps and batch + 1 >= steps)
        if self.batches_remaining <= 0 and not is_last:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        del epoch, logs
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchState:
    """Keeps ``state.batch``: how many batches of the epoch are done.

    ``fit`` that begins in the middle of an epoch does the remaining ones of it, and whole epochs after that.

    Args:
        state: whose attribute to keep.
    """

    model: Any
    params: Mapping[str, Any] | None

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """See how many batches were done before."""
        del logs
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch; end the epoch after its last one."""
        del logs
        self.state.batch = done = self._before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._before and steps and done >= steps:
            EpochIsOver.declare(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count from 0 again."""
        del epoch, logs
        EpochIsOver.revoke(self.model)
        self.state.batch = self._before = 0


class UpdateEpochState:
    """Keeps ``state.epoch``: how many epochs are done.

    Args:
        state: whose attribute to keep.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch
        self._first: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """See how many epochs were done before."""
        del logs
        self.initial_epoch, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See whether ``fit`` counts from 0 or from ``state.epoch``."""
        del logs
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        del logs
        self.state.epoch = self.initial_epoch + epoch - (self._first or 0) + 1
