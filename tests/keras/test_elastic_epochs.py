"""A loss at the end of an epoch, or of the training, inside of ``hvd.elastic.fit``."""

from __future__ import annotations

from typing import Any

import pytest
from harness import on_ranks
from keras_kind import keras_and_hvd


@pytest.mark.slow
@on_ranks(1, given=["backend"])
def test_a_loss_at_the_end_of_fit_keeps_its_history() -> None:
    """The reduction after those of four steps is that of ``on_train_end``. Keras does not warn that it ignores shuffle,
    as ``hvd.elastic.fit`` does not.
    """
    import warnings

    import numpy as np
    from losing import losing

    keras, hvd = keras_and_hvd()
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = hvd.elastic.KerasState(model)
    end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: hvd.allreduce(np.ones(1, "float32"), name="end"))

    @hvd.elastic.run
    def train(state: Any) -> Any:
        x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
        return hvd.elastic.fit(state, x, y, batch_size=4, epochs=2, callbacks=[end], verbose=0)

    with losing((5,)) as losses, warnings.catch_warnings():
        warnings.filterwarnings("error", message="`shuffle=True`")
        history = train(state).history
    assert (losses.count, state.progress, len(history["loss"])) == (1, 4, 2)


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_a_loss_after_validation_keeps_the_metrics_of_all_epochs() -> None:
    """Each epoch has two steps, and a reduction in a callback at its end; that of the second epoch fails."""
    import numpy as np
    from losing import losing

    keras, hvd = keras_and_hvd()
    x = np.arange(32, dtype="float32").reshape(8, 4) / 32
    y = x.sum(1, keepdims=True)

    def trained(which: tuple[int, ...]) -> Any:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", metrics=["mae"])
        state = hvd.elastic.KerasState(model)
        begun: list[int] = []
        callbacks = [
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: hvd.allreduce(np.ones(1, "float32"), name="end")),
            keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: begun.append(-1), on_epoch_begin=lambda epoch, logs: begun.append(epoch)
            ),
        ]

        @hvd.elastic.run
        def train(state: Any) -> Any:
            return hvd.elastic.fit(
                state, x, y, batch_size=4, epochs=3, callbacks=callbacks, verbose=0, validation_data=(x * 9, y)
            )

        with losing(which) as losses:
            history = train(state)
        assert (losses.count, state.progress, begun) == (len(which), 6, [-1, 0, 1, 2])
        return history.epoch, history.history

    wanted, found = trained(()), trained((6,))
    assert wanted[0] == [0, 1, 2]
    assert found == wanted


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_the_next_start_has_the_metrics_of_an_epoch_that_had_only_its_end_to_do() -> None:
    """The first one ends in the validation of the second epoch."""
    import tempfile

    import numpy as np

    from horovod.bindings.elastic import checkpoint

    keras, hvd = keras_and_hvd()
    x = np.arange(32, dtype="float32").reshape(8, 4) / 32
    y = 3 * x.sum(1, keepdims=True)

    def new() -> Any:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", metrics=["mae"])
        return hvd.elastic.KerasState(model)

    @hvd.elastic.run
    def train(state: Any, *callbacks: Any) -> Any:
        found = hvd.elastic.fit(
            state, x, y, batch_size=4, epochs=3, callbacks=callbacks, verbose=0, validation_data=(x * 9, y)
        )
        return found.history

    def end(logs: Any) -> None:
        if first.epoch == 1:
            raise OSError("the job ends")

    first, second = new(), new()
    with pytest.raises(OSError, match="the job ends"):
        train(first, keras.callbacks.LambdaCallback(on_test_begin=end))
    with tempfile.TemporaryDirectory() as folder:
        second.load_checkpoint(checkpoint.read(checkpoint.write(folder, 4, first.checkpoint())))
    second.save()
    found, wanted = train(second), train(new())
    assert found.keys() == {"loss", "mae", "val_loss", "val_mae"}
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values[1:], rtol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["keras-tensorflow", "keras-jax", "tf_keras"])
@on_ranks(1, given=["framework"])
def test_steps_per_execution_groups_the_batches_that_a_shard_deals() -> None:
    """Each epoch has five batches; the reduction of the second group of two fails, or of its first batch."""
    import numpy as np
    from losing import losing

    keras, hvd = keras_and_hvd()
    x, y = np.arange(20, dtype="float32").reshape(10, 2) / 20, np.ones((10, 1), "float32")

    def trained(which: tuple[int, ...], steps: int) -> tuple[list[Any], int]:
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer=optimizer, loss="mse", steps_per_execution=steps)
        state = hvd.elastic.KerasState(model)

        @hvd.elastic.run
        def train(state: Any) -> None:
            hvd.elastic.fit(state, x, y, batch_size=2, epochs=2, verbose=0)

        with losing(which) as losses:
            train(state)
        assert (losses.count, state.epoch, int(model.optimizer.iterations)) == (len(which), 2, 10)
        return [value.tolist() for value in model.get_weights()], state.progress

    wanted, progress = trained((), 1)
    assert progress == 10
    assert trained((), 2) == trained((3,), 2) == (wanted, 6)
    if hasattr(keras, "__version__"):  # not tf_keras
        keras.__version__ = "3.6.0"
        with pytest.raises(ValueError, match=r"steps_per_execution > 1 with Keras 3\.7 or later: Keras 3\.6\.0 drops"):
            trained((), 2)


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_the_rest_of_an_epoch_keeps_its_learning_rate() -> None:
    """A reduction in a callback after the first of two steps fails, so that ``fit`` begins anew in the epoch."""
    import numpy as np
    from losing import losing

    keras, hvd = keras_and_hvd()
    x, y = np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")

    def trained(which: tuple[int, ...]) -> tuple[float, list[float]]:
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        model.set_weights([np.ones((1, 1), "float32")])
        state, rates = hvd.elastic.KerasState(model), []
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: hvd.allreduce(np.ones(1, "float32"), name="end"),
                on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate)),
            ),
        ]

        @hvd.elastic.run
        def train(state: Any) -> Any:
            hvd.elastic.fit(state, x, y, batch_size=2, epochs=2, callbacks=callbacks, verbose=0)

        with losing(which) as losses:
            train(state)
        assert losses.count == len(which)
        return float(model.get_weights()[0].sum()), rates

    assert trained((2,)) == trained(()) == (0.75**2 * 0.5**2, [0.25, 0.125])


_DECIDED = [(3, 0.75 * 0.75 * 0.5 * 8)] * 2  # the gradient is twice the weight


@pytest.mark.slow
@on_ranks(2, returns=_DECIDED, given=["framework"])
def test_all_ranks_stop_and_change_learning_rate_and_weights_as_rank_0_does() -> Any:
    """As callbacks do of which another rank, which has just joined, has seen too few epochs."""
    import numpy as np

    keras, hvd = keras_and_hvd()
    hvd.init()

    class Decide(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if hvd.rank() == 0 and epoch == 1:
                self.model.optimizer.learning_rate.assign(0.25)
            if hvd.rank() == 0 and epoch == 2:
                self.model.stop_training = True

        def on_train_end(self, logs: Any = None) -> None:
            if hvd.rank() == 0:
                self.model.set_weights([self.model.get_weights()[0] * 8])

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)), loss="mse")
    model.set_weights([np.ones((1, 1), "float32")])
    state = hvd.elastic.KerasState(model)
    x, y = np.ones((2, 1), "float32"), np.zeros((2, 1), "float32")
    hvd.elastic.fit(state, x, y, batch_size=1, epochs=5, callbacks=[Decide()], verbose=0)
    return state.epoch, float(model.get_weights()[0].sum())


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_a_loss_after_the_last_epoch_undoes_no_decision_of_a_callback() -> None:
    """Callbacks stop two trainings after an epoch each; after the second one ranks are lost, until it ends."""
    import numpy as np
    from losing import losing

    from horovod._keras import elastic_fit
    from horovod.errors import PeerLostError

    keras, hvd = keras_and_hvd()
    events: list[Any] = []
    left = [False, True]  # whether the exchange after each epoch fails

    def exchange(value: Any, root: int, name: str) -> Any:
        if name == "elastic.fit.decisions" and left.pop(0):
            raise PeerLostError("rank 1 is lost by the test")
        return value

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            events.append(epoch)
            self.model.stop_training = True

        def on_train_end(self, logs: Any = None) -> None:
            events.append("end")
            hvd.allreduce(np.ones(1, "float32"), name="end")

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = hvd.elastic.KerasState(model)
    x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")

    @hvd.elastic.run
    def train(state: Any) -> Any:
        hvd.elastic.fit(state, x, y, batch_size=4, epochs=4, callbacks=[Stop()], verbose=0)
        return hvd.elastic.fit(state, x, y, batch_size=4, epochs=5, callbacks=[Stop()], verbose=0)

    with losing((4,)) as losses, pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic_fit, "broadcast_object", exchange)
        history = train(state)
    assert (losses.count, left, events) == (1, [], [0, "end", 1, "end", "end"])
    assert (state.epoch, state.progress, history.epoch) == (2, 2, [1])


@pytest.mark.slow
@on_ranks(1, given=["framework"])
def test_a_new_rank_keeps_the_weights_of_the_others_when_training_begins() -> None:
    """It comes into the second ``fit`` of a script; its callback loads those with which the first one began."""
    import numpy as np

    keras, hvd = keras_and_hvd()
    seen: list[float] = []

    class Load(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.set_weights([np.zeros((1, 1), "float32")])

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(float(self.model.get_weights()[0].sum()))

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)), loss="mse")
    model.set_weights([np.full((1, 1), 8, "float32")])
    state = hvd.elastic.KerasState(model, epoch=1, _fit_goes_on=True)
    x, y = np.ones((1, 1), "float32"), np.zeros((1, 1), "float32")
    for epochs in (1, 2):
        hvd.elastic.fit(state, x, y, batch_size=1, epochs=epochs, callbacks=[Load()], verbose=0)
    assert (seen, model.get_weights()[0].sum()) == ([8.0], 6.0)


@pytest.mark.slow
@on_ranks(1, given=["backend"])
def test_fit_refuses_data_and_arguments_that_count_batches_by_themselves() -> None:
    import keras
    import numpy as np

    import horovod.keras as hvd

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return np.ones((2, 3)), np.ones((2, 1))

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state, said = hvd.elastic.KerasState(model), []
    x, y = np.ones((2, 3)), np.ones((2, 1))
    shard = hvd.elastic.shard((x, y), 2)
    wrong: list[dict[str, Any]] = [
        {"x": Batches()}, {"x": x, "y": y, "steps_per_epoch": 1},
        {"x": x, "y": y, "class_weight": {0: 1.0}},
        {"x": x, "y": y, "callbacks": [keras.callbacks.BackupAndRestore("backup")]},
        {"x": shard, "y": y}, {"x": shard, "sample_weight": y}, {"x": x, "sample_weight": y},
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.elastic.run(lambda state, how: hvd.elastic.fit(state, **how))(state, arguments)
        said.append(str(caught.value))
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    with pytest.raises(hvd.HorovodInternalError, match=r"with another optimizer \(.*Adam\) than its state holds"):
        hvd.elastic.run(lambda state: hvd.elastic.fit(state, x, y))(state)
    first, second, third, fourth, *others = said
    assert "not a Batches" in first
    assert "takes no steps_per_epoch" in second
    assert "takes no class_weight: give sample_weight" in third
    assert "takes no BackupAndRestore" in fourth
    assert ["give shard() a tuple" in other for other in others] == [True] * 3


@pytest.mark.slow
@on_ranks(2, given=["framework"])
def test_a_callback_that_stops_one_rank_only_is_an_error_on_all() -> None:
    """Else the others would wait for its gradients for ever, inside TensorFlow."""
    import numpy as np

    keras, hvd = keras_and_hvd()
    x = np.ones((16, 4), "float32")
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = hvd.elastic.KerasState(model)

    class Stop(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1 and hvd.rank() == 1

    said = "has ended on this rank and not on others" if hvd.rank() else "at the end of hvd.elastic.fit"
    with pytest.raises(Exception, match=said):
        hvd.elastic.run(lambda state: hvd.elastic.fit(state, x, x[:, :1], batch_size=2, callbacks=[Stop()]))(state)
