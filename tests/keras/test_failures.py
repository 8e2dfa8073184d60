"""A rank that is killed in ``fit`` ends the ``fit`` of the others, whatever Keras runs on."""

from __future__ import annotations

import os
import signal

import pytest
from harness import Ranks


def _until_somebody_dies() -> tuple[str, str]:
    import keras
    import keras_models

    import horovod.keras as hvd

    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if hvd.rank() == 1 and batch == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    model = keras_models.small(seed=hvd.rank())
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    try:
        keras_models.fit(model, [Dies()], epochs=1000)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing"


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_fit_of_the_others(backend: str) -> None:
    outcomes = Ranks(2, _until_somebody_dies, framework=f"keras-{backend}").outcomes()
    assert outcomes[1].exitcode == -signal.SIGKILL
    kind, text = outcomes[0].value
    assert kind == ("UnknownError" if backend == "tensorflow" else "PeerLostError"), text
    assert "rank 1" in text
    assert "SIGKILL" in text
