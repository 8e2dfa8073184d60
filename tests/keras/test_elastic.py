"""Elastic training in Keras: what a loss leaves behind, and the numbers that callbacks see."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from by_hand import weights_by_hand
from elastic_job import ElasticJob
from harness import LIMIT_S, on_ranks, run_ranks
from keras_kind import keras_and_hvd

from horovod.core.membership_events import Policy


def _undisturbed_and_disturbed(which: tuple[int, ...], jit_compile: bool) -> None:
    """With batch norm, dropout, metrics and Adam: all that a step changes before the gradients of all are there."""
    import numpy as np
    from losing import losing

    keras, hvd = keras_and_hvd()
    if os.environ.get("TF_USE_LEGACY_KERAS"):
        # Without it the random states of tf_keras are not variables.
        keras.backend.experimental.enable_tf_random_generator()

    class See(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.seen.append(("epoch", epoch))

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.seen.append(("begin", batch))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(("end", batch, float(logs["loss"])))

    random = np.random.default_rng(0)
    x = random.normal(size=(50, 4))
    y = x.sum(1, keepdims=True)

    def trained(which: tuple[int, ...]) -> Any:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential([
            layers.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1),
        ])  # fmt: skip
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], jit_compile=jit_compile)
        state, see = hvd.elastic.KerasState(model), See()

        @hvd.elastic.run
        def train(state: Any) -> Any:
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), see]
            return hvd.elastic.fit(state, x, y, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)

        with losing(which) as losses:
            history = train(state).history
        assert losses.count == len(which)
        assert (state.epoch, state.batch, state.progress) == (2, 0, 14)
        values = [np.array(value) for value in state._arrays(state._shared() + state._own())]
        return values, see.seen, history

    wanted, found = trained(()), trained(which)
    assert found[1:] == wanted[1:]
    for value, other in zip(found[0], wanted[0], strict=True):
        np.testing.assert_array_equal(value, other)
    steps = [event[1] for event in wanted[1] if event[0] == "end"]
    assert steps == [*range(7), *range(7)]


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_failed_step_of_fit_has_no_effect(backend: str, jit_compile: bool) -> None:
    if backend == "torch" and jit_compile:
        pytest.skip("torch.compile takes a minute and needs a compiler")
    # The first step; one in the middle of an epoch twice; the first of the second epoch.
    run_ranks(1, _undisturbed_and_disturbed, (1, 5, 6, 11), jit_compile, framework=f"keras-{backend}")


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_failed_step_of_fit_of_tf_keras_has_no_effect(jit_compile: bool) -> None:
    run_ranks(1, _undisturbed_and_disturbed, (5, 6, 11), jit_compile, framework="tf_keras")


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_a_step_that_fails_after_its_update_is_not_done_twice() -> None:
    """The mean of the loss is reduced after the update, and fails in the first and third step."""
    import numpy as np
    from losing import losing

    keras, hvd = keras_and_hvd()
    layers = keras.layers

    def trained(which: tuple[int, ...]) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Input((4,)), layers.Dense(8), layers.Dense(1, use_bias=False)])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
        state = hvd.elastic.KerasState(model)

        @hvd.elastic.step
        def one(state: Any) -> None:
            loss = model.train_on_batch(np.ones((2, 4), "float32"), np.ones((2, 1), "float32"))
            hvd.allreduce(np.asarray(loss, "float32"), name="loss")
            state.batch += 1

        @hvd.elastic.run
        def train(state: Any) -> None:
            while state.batch < 4:
                one(state)

        with losing(which) as losses:
            train(state)
        assert (losses.count, state.batch) == (len(which), 4)
        return [np.array(value) for value in state._arrays(state._shared())]

    for value, other in zip(trained((2, 8)), trained(()), strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_a_new_rank_keeps_the_velocities_that_callbacks_of_the_others_have_scaled() -> None:
    import numpy as np

    from horovod._keras.unsafe import velocities

    keras, hvd = keras_and_hvd()
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
    model.compile(optimizer=optimizer, loss="mse")
    state = hvd.elastic.KerasState(model, _fit_goes_on=True)
    model.set_weights([np.ones((1, 1), "float32")])
    velocities(optimizer)[0].assign(np.ones((1, 1), "float32"))
    zeros, schedule = np.zeros((1, 1), "float32"), hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 1.0)
    hvd.elastic.fit(state, zeros, zeros, batch_size=1, callbacks=[schedule], verbose=0)
    assert model.get_weights()[0].item() == 1.5, "its velocity was scaled once more"


@pytest.mark.slow
@on_ranks(2, given=["framework"], returns=[8.0] * 2)
def test_a_new_rank_begins_an_epoch_with_the_weights_that_callbacks_of_the_others_have_set() -> float:
    """Rank 1 is new, as after a loss in ``SwapEMAWeights.on_epoch_end``, which rank 0 takes back now."""
    import numpy as np

    keras, hvd = keras_and_hvd()
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
    model.set_weights([np.ones((1, 1), "float32")])
    x, seen = np.zeros((2, 1), "float32"), []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: hvd.rank() or model.set_weights([np.full((1, 1), 8, "float32")]),
        on_train_batch_begin=lambda batch, logs: seen.append(model.get_weights()[0].item()),
    )
    with mock.patch("horovod._keras.elastic_fit.context") as context:
        context.membership.return_value.previous = (0, -1)
        hvd.elastic.fit(hvd.elastic.KerasState(model), x, x, batch_size=1, callbacks=[callback], verbose=0)
    [found] = seen
    return found


def _example() -> Any:
    """As Horovod's examples do: a step before the ranks meet, and one in a callback after each loss."""
    import keras
    import numpy as np
    from losing import dying

    import horovod.keras as hvd
    from horovod import context

    hvd.init()
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    model.fit(x, y, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    def on_state_reset() -> None:
        model.optimizer.learning_rate.assign(0.01 * hvd.size())
        model.fit(x, y, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)

    state.register_reset_callbacks([on_state_reset])
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state),
    ]

    @hvd.elastic.run
    def train(state: Any) -> None:
        model.fit(x, y, batch_size=4, epochs=5 - state.epoch, callbacks=callbacks, shuffle=False, verbose=0)
        if context.membership().number < 3:
            _wait_for(lambda: context.wants_change() or context.membership().number > 2)
            state.check_host_updates()

    with dying(4):
        train(state)
    weights = [np.array(value) for value in state._arrays(state._shared())]
    return weights, int(model.optimizer.iterations), state.epoch, float(model.optimizer.learning_rate)


@pytest.mark.slow
def test_scripts_of_horovod_run_unmodified(backend: str) -> None:
    import numpy as np

    policy = Policy(2, minimum=1, cool_down_s=(0, 0))
    with ElasticJob(_example, policy, {"a": 2}, framework=f"keras-{backend}") as job:
        values = list(job.values().values())
    assert len(values) == 2
    for weights, iterations, epoch, rate in values:
        # One step before the ranks met, and two in each epoch.
        assert (iterations, epoch) == (11, 5)
        assert rate == pytest.approx(0.02)
        for value, other in zip(weights, values[0][0], strict=True):
            np.testing.assert_array_equal(value, other)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S / 2
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def _fit(ends: int) -> dict[str, Any]:
    """A linear model whose weights can be computed by hand; rank 1 dies in the fourth step."""
    import keras
    import numpy as np
    from losing import dying

    import horovod.keras as hvd
    from horovod import context

    hvd.init()
    events: list[Any] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            view = context.membership()
            events.append((self.epoch, batch, view.number, hvd.rank(), hvd.size()))
            if self.epoch == 1 and batch == 0 and hvd.rank() == 0:
                _wait_for(lambda: context.wants_change() or hvd.size() == 3)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

    random = np.random.default_rng(0)
    x = random.normal(size=(ends, 3)).astype("float32")
    y = (x @ [[1.0], [2.0], [3.0]]).astype("float32")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.set_weights([np.zeros((3, 1))])
    state = hvd.elastic.KerasState(model)

    @hvd.elastic.run
    def train(state: Any) -> None:
        # Relative to the present rate: a rank that joins in an epoch gets a rate that the others have changed already.
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), halve]
        callbacks.append(Watch())
        hvd.elastic.fit(state, x, y, batch_size=4, epochs=2, seed=5, callbacks=callbacks, verbose=0)

    with dying(4):
        train(state)
    return {"events": events, "weights": model.get_weights()[0], "place": (state.epoch, state.batch), "xy": (x, y)}


@pytest.mark.slow
def test_fit_goes_on_inside_when_a_rank_is_killed_and_another_joins(backend: str) -> None:
    import numpy as np

    policy = Policy(3, minimum=2, cool_down_s=(0, 0))
    with ElasticJob(_fit, policy, {"a": 3}, args=(120,), framework=f"keras-{backend}") as job:
        ends = job.ends()
    assert job.finish == "", job.finish
    values = [end.outcome.value for end in ends if end.outcome.value is not None]
    assert len(values) == 3, [end.outcome.text for end in ends]
    assert sum(end.outcome.exitcode == -signal.SIGKILL for end in ends) == 1
    longest = max(values, key=lambda value: len(value["events"]))
    places = [event[:2] for event in longest["events"]]
    assert places == sorted(set(places)), "each batch of each epoch once, in order"
    sizes = [event[4] for event in longest["events"]]
    wanted = weights_by_hand(*longest["xy"], sizes, [0.05, 0.025], shuffle=True, seed=5)
    for value in values:
        assert value["place"] == (2, 0)
        np.testing.assert_allclose(value["weights"], wanted, rtol=2e-4, atol=1e-5)
        np.testing.assert_array_equal(value["weights"], longest["weights"])
        own = [event[:2] for event in value["events"]]
        assert own == places[-len(own) :], "a rank that joins counts as the others do"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts_from_zero", "batches_per_commit", "kind"),
    [(True, 1, "arrays"), (False, 2, "arrays"), (False, 1, "steps"), (True, 1, "dataset")],
)
@on_ranks(1, given=["backend"])
def test_fit_as_scripts_of_horovod_call_it(counts_from_zero: bool, batches_per_commit: int, kind: str) -> None:
    """All batches are alike, so that the number of steps says which weights there must be."""
    import keras
    import numpy as np
    from losing import losing

    import horovod.keras as hvd

    x = np.tile(np.random.default_rng(0).normal(size=(4, 3)), (6, 1)).astype("float32")
    y = x.sum(1, keepdims=True)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return x[:4], y[:4]

    def trained(which: tuple[int, ...]) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
        state = hvd.elastic.KerasState(model, batch=0, epoch=0)
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(state.batch)])
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append((state.epoch, state.batch))),
        ]
        ends: list[Any] = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            first = 0 if counts_from_zero else state.epoch
            last = 4 - state.epoch if counts_from_zero else 4
            data: dict[str, Any] = {"x": Batches()} if kind == "dataset" else {"x": x, "y": y, "batch_size": 4}
            if kind == "steps":
                data["steps_per_epoch"] = 6
            state.model.fit(
                **data, initial_epoch=first, epochs=last, callbacks=callbacks, shuffle=False, verbose=0
            )  # fmt: skip

        with losing(which) as losses:
            train(state)
        assert losses.count == len(which)
        assert (state.epoch, state.batch) == (4, 0)
        assert ends == [(1, 0), (2, 0), (3, 0), (4, 0)]
        return [keras.ops.convert_to_numpy(v) for v in state._shared()], resets

    wanted, _ = trained(())
    found, resets = trained((4, 10, 11))
    # In the fourth step, and twice in the second epoch.
    assert resets == ([3, 2, 2] if batches_per_commit == 1 else [2, 0, 0])
    for value, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(value, other)
