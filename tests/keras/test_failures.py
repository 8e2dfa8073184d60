"""A rank that is killed in ``fit`` ends the ``fit`` of the others, whatever Keras runs on."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from harness import Ranks, on_ranks
from heard import heard
from later import later

from horovod.errors import RequestError

hvd, keras = later("horovod.keras"), later("keras")


def _until_somebody_dies() -> tuple[str, str]:
    import keras_models

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


@on_ranks(2, framework="keras-jax")
def test_values_that_a_failed_step_of_jax_took_along_come_from_the_root() -> None:
    variable = keras.Variable(np.full(3, hvd.rank() + 1.0))
    if hvd.rank() == 1:
        variable.value.delete()
    hvd.broadcast_variables([variable], root_rank=0)
    np.testing.assert_array_equal(variable, np.ones(3))
    if hvd.rank() == 1:
        variable.value.delete()
        with pytest.raises(RequestError, match="rank 1 has no values to broadcast"):
            hvd.broadcast(variable, root_rank=1, name="lost")


@on_ranks(2, framework="keras-jax")
def test_an_interrupt_in_the_middle_of_an_update_says_what_to_do() -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer._reduction.combine = interrupt
    with heard() as told, pytest.raises(KeyboardInterrupt):
        optimizer.apply([keras.ops.ones(3)], [keras.Variable(np.ones(3))])
    assert "BroadcastGlobalVariablesCallback(0)" in told[-1]
