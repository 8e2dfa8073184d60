"""Values that the state of a model of Keras holds, which a failed step leaves unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from elastic_job import ElasticJob
from harness import on_ranks
from keras_kind import keras_and_hvd

from horovod.core.membership_events import Policy


@pytest.mark.slow
@on_ranks(2, given=["framework"])
def test_a_state_holds_all_optimizers_of_a_model() -> None:
    """As a GAN has two, one of which its own ``train_step`` uses."""
    import numpy as np

    keras, hvd = keras_and_hvd()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.second = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    model.more = [hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))]
    state = hvd.elastic.KerasState(model)
    variables = []
    for optimizer in (model.second, *model.more):
        own = optimizer.variables
        variables += own() if callable(own) else own
    assert len(variables) > 8
    for variable in variables:
        variable.assign(np.full(variable.shape, 3 + hvd.rank()))
    state.sync()
    assert all((np.array(value) == 3).all() for value in state._arrays(variables))
    state.capture()
    model.second.iterations.assign(7)
    assert state.undo()
    assert int(model.second.iterations) == 3


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_a_failed_step_has_no_effect_on_the_states_of_recurrent_layers() -> None:
    import numpy as np

    keras, hvd = keras_and_hvd()
    model = keras.Sequential([
        keras.layers.Input((2, 1), batch_size=2), keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1),
    ])  # fmt: skip
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = hvd.elastic.KerasState(model)
    state.capture()
    kept = model.layers[0].states
    for variable in kept:
        variable.assign(np.ones((2, 3)))
    state.undo()
    assert not any(np.array(value).any() for value in state._arrays(kept))


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_a_state_goes_back_to_values_from_before_the_first_batch() -> None:
    import numpy as np

    keras, hvd = keras_and_hvd()
    hvd.init()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    state = hvd.elastic.KerasState(model)
    first = [np.array(value) for value in model.get_weights()]
    model.fit(np.ones((8, 3)), np.zeros((8, 1)), batch_size=4, verbose=0)  # makes the variables of metrics
    assert any((new != old).any() for new, old in zip(model.get_weights(), first, strict=True))
    state.restore()
    assert all((new == old).all() for new, old in zip(model.get_weights(), first, strict=True))
    assert not any(np.array(each).any() for metric in model.metrics for each in metric.variables)


def _accumulated() -> Any:
    """Rank 1 dies in the first update; another one joins after it, and has no update before the end."""
    import time

    import keras
    import numpy as np
    from losing import dying

    import horovod.keras as hvd
    from horovod import context

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    model.compile(optimizer=hvd.DistributedOptimizer(sgd), loss="mse")
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")

    class Wait(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            while hvd.size() == 1 and not context.wants_change():
                time.sleep(0.01)

    @hvd.elastic.run
    def train(state: Any) -> None:
        hvd.elastic.fit(state, x, x[:, :1], batch_size=2, callbacks=[Wait()], verbose=0)

    with dying(1):
        train(hvd.elastic.KerasState(model))
    sums = keras.ops.convert_to_numpy(model.optimizer._accumulated_gradients[0])
    return int(model.optimizer._iterations), model.get_weights()[0].tolist(), sums.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_a_rank_without_an_update_of_its_own_ends_a_fit_and_keeps_its_sums(backend: str) -> None:
    with ElasticJob(_accumulated, Policy(2, 1, cool_down_s=(0, 0)), {"a": 2}, framework=f"keras-{backend}") as job:
        (steps, weights, sums), (other_steps, other_weights, other_sums) = job.values().values()
    assert (steps, weights) == (other_steps, other_weights) == (7, weights)
    assert sums != other_sums
