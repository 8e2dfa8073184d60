"""Gradients that Keras has added up since its last update, when a rank is lost or joins."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from elastic_job import ElasticJob

from horovod.core.membership_events import Policy


def _fit_with_passes(samples: int, joins: bool) -> Any:
    """Each sample has a weight of its own, which counts how often it was used; rank 2 dies in the last of 3 passes.

    With ``joins``, another one comes before the end of the next update.
    """
    import keras
    import numpy as np

    import horovod.keras as hvd
    from horovod import context

    slot = int(os.environ["HOROVOD_SLOT"])
    hvd.init()

    class Die(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                hvd.allreduce(np.ones(1, "float32"), name="all have done two passes")
            if (slot, batch) == (2, 2):
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            while joins and batch == 3 and hvd.size() == 2 and not context.wants_change():
                time.sleep(0.01)

    model = keras.Sequential([keras.layers.Input((samples,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((samples, 1))])
    sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=3)
    model.compile(sgd, loss=keras.losses.Hinge(reduction="sum"))  # 1 - y_pred of each sample
    state = hvd.elastic.KerasState(model)

    @hvd.elastic.run
    def train(state: Any) -> None:
        x = np.eye(samples, dtype="float32")
        hvd.elastic.fit(
            state, x, np.ones((samples, 1)), batch_size=2, epochs=1, callbacks=[Die()], shuffle=False, verbose=0
        )

    train(state)
    return model.get_weights()[0].reshape(-1).tolist()


@pytest.mark.slow
def test_the_sums_of_survivors_stay_their_own(backend: str) -> None:
    """Those of rank 0 counted its samples once for each rank, and left out those of the others."""
    with ElasticJob(_fit_with_passes, Policy(3, minimum=2), {"a": 3}, (16, False), framework=f"keras-{backend}") as job:
        weights = job.values()
    assert sorted(slot.number for slot in weights) == [0, 1]
    for found in weights.values():
        assert sorted(found) == pytest.approx([0] * 4 + [1] * 12), "two batches of the lost rank are missing"


@pytest.mark.slow
def test_a_rank_that_joins_between_two_updates_has_no_sums(backend: str) -> None:
    """It took those of rank 0, whose samples then counted twice."""
    policy = Policy(3, minimum=2, cool_down_s=(0, 0))
    with ElasticJob(_fit_with_passes, policy, {"a": 3}, (32, True), framework=f"keras-{backend}") as job:
        weights = job.values()
    assert sorted(slot.number for slot in weights) == [0, 1, 2]
    for found in weights.values():
        assert sorted(found) == pytest.approx([0] * 4 + [1] * 28), "two batches of the lost rank are missing"
