"""The callbacks: the same start, the same metrics, learning rates, and what is said when ranks drift apart."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import on_ranks
from heard import heard
from later import later

hvd, keras = later("horovod.keras"), later("keras")


@pytest.mark.slow
@on_ranks(2, returns=[[True, True, False, True]] * 2, given=["backend"])
def test_all_ranks_begin_with_the_model_of_one_but_for_local_layers() -> list[bool]:
    from keras_models import data, fit, is_same_everywhere, shard, small

    class Unbuilt(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = keras.layers.Dense(4), keras.layers.BatchNormalization()
            self.last = keras.layers.Dense(3)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.last(self.norm(self.first(x), training=training))

    keras.utils.set_random_seed(hvd.rank())
    unbuilt = Unbuilt()
    unbuilt.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    fit(unbuilt)
    unshaped = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(3)])  # no Input
    unshaped.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    fit(unshaped)
    partial = small(seed=hvd.rank())
    own = partial.layers[0]
    partial.compile(hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=own), "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own.weights)
    partial.fit(*map(shard, data()), batch_size=8, verbose=0, callbacks=[callback])
    return [
        is_same_everywhere([*unbuilt.trainable_weights, *unbuilt.optimizer.variables]),
        is_same_everywhere([*unshaped.trainable_weights, *unshaped.optimizer.variables]),
        is_same_everywhere(own.weights),
        is_same_everywhere(partial.layers[1].weights),
    ]


@pytest.mark.slow
@on_ranks(2, returns=[[True] * 4] * 2, given=["backend"])
def test_one_callback_serves_one_model_after_another() -> list[bool]:
    from keras_models import data, is_same_everywhere, shard, small

    callback, equal = hvd.callbacks.BroadcastGlobalVariablesCallback(0), []
    kept = small(seed=9)
    for fold in range(4):  # first with new models on all ranks, then on rank 0 alone
        model = small(seed=10 * fold + hvd.rank()) if fold < 2 or hvd.rank() == 0 else kept
        model.compile(hvd.DistributedOptimizer("sgd"), "mse")
        model.fit(*map(shard, data()), batch_size=8, verbose=0, callbacks=[callback])
        equal.append(is_same_everywhere(model.weights))
    return equal


@pytest.mark.slow
@on_ranks(2, framework="keras-tensorflow", returns=[([True, True], [])] * 2)
def test_models_with_optimizers_of_their_own_begin_alike_too() -> tuple[list[bool], list[str]]:
    import tensorflow as tf
    from keras_models import data, fit, is_same_everywhere

    class Pair(keras.Model):
        """As in Keras' guides: two models, each with its optimizer, and a step of its own."""

        def __init__(self) -> None:
            super().__init__()
            shape = keras.layers.Input(data()[0].shape[1:])
            self.parts = [keras.Sequential([shape, keras.layers.Dense(1)]) for _ in range(2)]
            self.optimizers = [hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)) for _ in range(2)]

        def train_step(self, both: Any) -> dict[str, Any]:
            for part, optimizer in zip(self.parts, self.optimizers, strict=True):
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean(part(both[0]) ** 2)
                optimizer.apply_gradients(zip(tape.gradient(loss, part.trainable_weights), part.trainable_weights))
            return {"loss": loss}

    with heard() as told:
        keras.utils.set_random_seed(hvd.rank())
        pair = Pair()
        pair.compile()
        fit(pair, epochs=1)
    return [is_same_everywhere(part.weights) for part in pair.parts], told


@pytest.mark.slow
@on_ranks(2, given=["backend"])
def test_a_missing_broadcast_or_wrapper_is_told_in_the_first_step() -> None:
    from keras_models import data, shard, small

    with heard() as told:
        model = small(seed=hvd.rank())
        model.compile(hvd.DistributedOptimizer("sgd"), "mse")
        model.fit(*map(shard, data()), batch_size=8, verbose=0)
        model.compile("sgd", "mse")
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*map(shard, data()), batch_size=8, verbose=0, callbacks=[callback])
    if hvd.rank():
        assert told == []
        return
    text, plain = told
    assert "is compiled with a plain SGD: each of the 2 ranks trains a model of its own" in plain
    assert "hvd.DistributedOptimizer(optimizer)" in plain
    assert "the ranks train different models" in text
    assert "kernel" in text
    assert "BroadcastGlobalVariablesCallback(0)" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["known", "generator", "metrics"])
@on_ranks(2, given=["backend"])
def test_different_numbers_of_steps_are_an_error_that_says_what_to_do(kind: str) -> None:
    from keras_models import data, small

    x, y = data()
    steps = 3 + hvd.rank()

    def batches() -> Iterator[Any]:
        for _ in range(steps):
            yield x[:8], y[:8]

    model = small(seed=0)
    model.compile(hvd.DistributedOptimizer("sgd"), "mse")
    callbacks: list[Any] = {
        "known": [hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        "generator": [],
        "metrics": [hvd.callbacks.MetricAverageCallback()],
    }[kind]
    inputs = (x[: 8 * steps], y[: 8 * steps]) if kind == "known" else (batches(),)
    with warnings.catch_warnings(), pytest.raises(Exception) as caught:
        warnings.simplefilter("ignore")
        model.fit(*inputs, **({"batch_size": 8} if kind == "known" else {}), verbose=0, callbacks=callbacks)
    text = str(caught.value)
    if hvd.rank() == 0:
        assert "steps_per_epoch=" in text
    elif kind == "known":
        assert "rank 0: 3; rank 1: 4" in text
    else:
        assert "Mismatched number of tensors" in text
        assert re.search(r"rank 0: 1  allreduce at the end of .* there \(.*steps_per_epoch=.*\), .*\.py:\d+", text)


@pytest.mark.slow
@on_ranks(2, given=["backend"])
def test_learning_rates_warm_up_and_follow_their_schedule() -> None:
    from keras_models import data, fit, small

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(round(float(np.asarray(self.model.optimizer.learning_rate)), 4))

    seen: list[float] = []
    model = small(seed=0)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)), "mse")
    later = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.1**epoch, start_epoch=2)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    average = hvd.callbacks.MetricAverageCallback()
    history = fit(model, [warmup, later, average, See()], epochs=3).history
    own = model.evaluate(*data(), verbose=0)
    assert seen == [0.225, 0.25, 0.275, 0.3, 0.325, 0.35, 0.375, 0.4, *[0.004] * 4]
    assert [round(rate, 4) for rate in history["lr"]] == [0.3, 0.4, 0.004]
    # Each rank has its own data, and yet the same figures.
    figures = (history["loss"][-1], float(own))
    assert hvd.allgather_object(figures) == [figures] * 2


@on_ranks(2, returns=[[4, 3, 8, 3]] * 2, given=["backend"])
def test_a_schedule_counts_the_steps_of_each_fit() -> list[Any]:
    counted = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False)
    given = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False, steps_per_epoch=3)
    found = []
    for steps in (4, 8):
        for callback in (counted, given):
            callback.set_params({"steps": steps})
            callback.on_train_begin()
            found.append(callback.steps_per_epoch)
    return found


@on_ranks(2, returns=[[0.25, 2.0]] * 2, given=["backend"])
def test_velocities_are_scaled_with_the_learning_rate() -> list[float]:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)), "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.momentums[0].assign([[8.0]])
    callback = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.25)
    callback.set_model(model)
    callback.on_epoch_begin(1)
    callback.on_train_batch_begin(0)
    return [float(np.asarray(model.optimizer.learning_rate)), float(np.asarray(model.optimizer.momentums[0]).item())]


@pytest.mark.slow
@on_ranks(2, returns=[["best.keras"]] * 2, given=["backend"])
def test_the_best_model_is_kept_by_rank_0(tmp_path: Path) -> list[str]:
    from keras_models import fit, small

    model = small(seed=0)
    model.compile(hvd.DistributedOptimizer("sgd"), "mse")
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="set its attribute filepath"):
        fit(model, [callback])
    callback.filepath = str(tmp_path / "best.keras")
    fit(model, [hvd.callbacks.MetricAverageCallback(), callback])
    hvd.barrier()
    loaded = keras.saving.load_model(callback.filepath)
    return [path.name for path in tmp_path.iterdir() if loaded.count_params() == model.count_params()]
