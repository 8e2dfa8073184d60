"""horovod.tensorflow.keras: tf_keras with both of its kinds of optimizers, and Keras 3."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from commands import run
from harness import on_ranks
from later import later

hvd, tf = later("horovod.tensorflow.keras"), later("tensorflow")


def _data() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(64, 8)), random.normal(size=(64, 3))


def _own(values: Any) -> Any:
    return values.reshape(4, 2, 8, -1)[:, hvd.rank()].reshape(32, -1)


def _is_same_everywhere(model: Any) -> bool:
    own = [weight.tobytes() for weight in model.get_weights()]
    return all(other == own for other in hvd.allgather_object(own))


def _model(seed: int) -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    return keras.Sequential([keras.layers.Input((8,)), dense(16, activation="tanh"), dense(3)])


@pytest.mark.slow
@on_ranks(2, framework="tf_keras")
def test_ranks_of_tf_keras_train_as_one_process() -> None:
    assert "keras" not in sys.modules, "Keras 3 is not loaded beside tf_keras"
    keras = tf.keras
    keras.backend.set_floatx("float64")
    x, y = _data()
    new, old = keras.optimizers, keras.optimizers.legacy
    for make, eagerly, passes in (
        (lambda: new.SGD(0.1, momentum=0.9, clipnorm=0.05), False, 1),
        (lambda: new.Adam(0.01), False, 1),
        (lambda: new.Adam(0.01), True, 1),
        (lambda: old.SGD(0.1, momentum=0.9), False, 1),
        (lambda: new.SGD(0.1), False, 2),
    ):
        model, alone = _model(1 + hvd.rank()), _model(1)
        optimizer = hvd.DistributedOptimizer(
            make(), backward_passes_per_step=passes, average_aggregated_gradients=passes > 1
        )
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        model.fit(_own(x), _own(y), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        alone.compile(make(), "mse", run_eagerly=eagerly)
        alone.fit(x, y, batch_size=16 * passes, shuffle=False, verbose=0)
        case = f"{type(optimizer).__name__} {eagerly} {passes}"
        assert _is_same_everywhere(model), case
        for mine, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-12, err_msg=case)
    keras.backend.set_floatx("float32")


@pytest.mark.slow
@on_ranks(1, framework="tf_keras")
def test_several_passes_of_tf_keras_are_refused_in_elastic_jobs() -> None:
    """It must raise: a plain job, where no rank joins, may have several passes."""
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model = _model(1)
    model.compile(optimizer, "mse")
    hvd.elastic.KerasState(model)
    with mock.patch("horovod.context.is_elastic", lambda: True), pytest.raises(NotImplementedError, match="sums"):
        hvd.elastic.KerasState(model)


@pytest.mark.slow
@on_ranks(1, framework="tf_keras")
def test_velocities_of_all_optimizers_of_tf_keras_are_scaled_with_the_learning_rate() -> None:
    keras = tf.keras
    x = np.ones((8, 1), np.float32)
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        steps = [0.0]
        model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(hvd.DistributedOptimizer(make(1.0, momentum=0.9)), lambda _, y: tf.reduce_mean(y))
        schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.1**epoch)
        see = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, model=model, steps=steps: steps.append(model.get_weights()[0].item())
        )
        model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[schedule, see])
        np.testing.assert_allclose(np.diff(steps), [-1.0, -1.9, -0.271, -0.3439], rtol=1e-5, err_msg=str(make))


@pytest.mark.slow
@on_ranks(2, framework="tf_keras", returns=[[0.25, 0.25]] * 2)
def test_a_state_sends_the_learning_rate_of_all_optimizers_of_tf_keras() -> list[float]:
    rates = []
    for make in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        model = _model(1)
        model.compile(hvd.DistributedOptimizer(make(1.0)), "mse")
        state = hvd.elastic.KerasState(model)
        model.optimizer.learning_rate = 0.25 if hvd.rank() == 0 else 0.5
        state.sync()
        rates.append(float(model.optimizer.learning_rate))
    return rates


@pytest.mark.slow
@on_ranks(2, returns=[[0.4, False, True, 8, [-0.5], 1.0]] * 2, framework="tf_keras")
def test_callbacks_files_and_loops_of_tf_keras(tmp_path: Path) -> list[Any]:
    keras = tf.keras
    x, y = (_own(values).astype("float32") for values in _data())
    path = str(tmp_path / f"{hvd.rank()}.keras")
    model = _model(0)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)), "mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1)
    history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[warmup]).history
    model.save(path)
    plain, loaded = keras.models.load_model(path), hvd.load_model(path)
    loaded.fit(x, y, batch_size=8, verbose=0)
    # A loop of one's own asks for no gradients, and still applies those of all ranks.
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply_gradients([(tf.constant([float(hvd.rank())]), variable)])
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        with tf.GradientTape() as tape:
            loss = variable * (1.0 + hvd.rank())
        ((gradient, _),) = hvd.DistributedOptimizer(make(1.0))._compute_gradients(loss, [variable], tape=tape)
        assert gradient.numpy().tolist() == [1.5]
    return [
        round(history["lr"][0], 4),
        hasattr(plain.optimizer, "register_local_var"),
        hasattr(loaded.optimizer, "register_local_var"),
        int(loaded.optimizer.iterations.numpy()),
        variable.numpy().tolist(),
        np.asarray(hvd.allreduce(1.0 * hvd.rank(), op=hvd.Sum)).tolist(),
    ]


@pytest.mark.slow
@on_ranks(2, framework="tf_keras", returns=[[True, 2.0**14, True, 2.0**14]] * 2)
def test_an_overflow_on_one_rank_skips_the_step_of_tf_keras_on_all() -> list[Any]:
    keras = tf.keras
    x, y = (_own(values).astype("float32") for values in _data())
    if hvd.rank() == 1:
        x[8:16] *= 1e30  # overflows on one rank, in the second step
    found = []
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
            model = _model(0)
            # compile() puts loss scaling around it.
            model.compile(hvd.DistributedOptimizer(make(0.1)), "mse")
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            found += [_is_same_everywhere(model), float(model.optimizer.loss_scale.numpy())]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return found


def test_keras_3_is_there_without_tf_keras(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["tf_keras"] = None
import tensorflow, horovod.keras as hvd, horovod.tensorflow
hvd.init()
try:
    horovod.tensorflow.SyncBatchNormalization
except ImportError as error:
    print(error)
"""
    variables = {"TF_USE_LEGACY_KERAS": "1", "KERAS_BACKEND": "tensorflow"}
    code, output = run([sys.executable, "-c", program], cwd=tmp_path, **variables)
    assert code == 0, output
    assert "hvd.SyncBatchNormalization needs tf.keras" in output


@pytest.mark.slow
@on_ranks(2, framework="keras-tensorflow", returns=[[True, True]] * 2)
def test_keras_3_is_tf_keras_by_default() -> list[Any]:
    import keras

    import horovod.tensorflow as hvd_tf

    x, y = (_own(values).astype("float32") for values in _data())
    found = []
    for distribute in (hvd.DistributedOptimizer, hvd_tf.DistributedOptimizer):
        model = _model(hvd.rank())
        model.compile(distribute(tf.keras.optimizers.SGD(0.1)), "mse")
        model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        found.append(_is_same_everywhere(model))
    assert issubclass(hvd.callbacks.MetricAverageCallback, keras.callbacks.Callback)
    return found


@on_ranks(2, returns=[[True] * 4] * 2, framework="tf_keras")
def test_batch_norm_of_tf_keras_takes_all_shapes_and_can_be_saved(tmp_path: Path) -> list[bool]:
    import horovod.tensorflow as hvd

    found = []
    for shape in ((8, 3), (8, 4, 4, 3)):
        x = np.random.default_rng(0).normal(size=shape).astype("float32")
        model = tf.keras.Sequential([hvd.SyncBatchNormalization(name="norm")])
        model.build((None, *shape[1:]))
        normal = model(x[hvd.rank() :: 2], training=True)
        axes = tuple(range(len(shape) - 1))
        wanted = (x - x.mean(axes)) / np.sqrt(x.var(axes) + 1e-3)
        path = str(tmp_path / f"{len(shape)}-{hvd.rank()}")
        model.save(path, save_format="tf")
        again = tf.saved_model.load(path)
        found.append(np.allclose(normal, wanted[hvd.rank() :: 2], atol=1e-5))
        found.append(np.allclose(again(x, training=False), model(x, training=False)))
    return found
