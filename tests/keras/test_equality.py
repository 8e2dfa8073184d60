"""N ranks train as one process does on all their data, on every backend, and have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import on_ranks
from later import later

hvd, keras = later("horovod.keras"), later("keras")

KINDS = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"learning_rate": 0.01}),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    # Clips the gradients of all ranks, not those of each.
    {"clipnorm": 0.05, "use_ema": True, "ema_momentum": 0.5},
    {"gradient_accumulation_steps": 2, "global_clipnorm": 0.05},
]


def _train(eagerly: bool, kind: str, options: list[dict[str, Any]]) -> list[float]:
    from keras_models import data, distance, exact, fit, is_same_everywhere

    name, arguments = KINDS[kind]
    found = []
    for more in options:
        make = getattr(keras.optimizers, name)
        model, alone = exact(seed=1 + hvd.rank()), exact(seed=1)
        optimizer = hvd.DistributedOptimizer(make(**arguments, **more))
        model.compile(optimizer, run_eagerly=eagerly)
        fit(model, dtype="float64")
        # Each rank accumulates by itself between two updates.
        shared = [np.asarray(v) for v in optimizer.variables if "accumulator" not in v.path]
        assert is_same_everywhere([*model.get_weights(), *shared])
        if hvd.rank() == 0:
            alone.compile(make(**arguments, **more), run_eagerly=eagerly)
            alone.fit(*data("float64"), batch_size=16, epochs=1, shuffle=False, verbose=0)
            found.append(distance(model.get_weights(), alone.get_weights()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "eagerly"), [("momentum", False), ("adam", False), ("sgd", True)])
def test_ranks_train_as_one_process(ranks: Callable[..., list[Any]], kind: str, eagerly: bool) -> None:
    # All optimizers share the code around the reduction, so one of them shows it.
    found, _ = ranks(_train, eagerly, kind, OPTIONS if kind == "momentum" else OPTIONS[:1])
    assert max(found) < 1e-12, found


@pytest.mark.slow
@on_ranks(2, returns=[[5, 3]] * 2, given=["backend"])
def test_each_update_is_reduced_once() -> list[int]:
    """Four passes make four updates, or two; and once each fit() ends on all ranks."""
    from keras_models import exact, fit

    counts = []
    steps = 1 if keras.backend.backend() == "torch" else 3
    for optimizer in (keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)):
        model = exact(seed=1)
        model.compile(hvd.DistributedOptimizer(optimizer), steps_per_execution=steps)
        fit(model, dtype="float64")
        counts.append(hvd.stats().kinds["allreduce"].operations)
    return [counts[0], counts[1] - counts[0]]


@pytest.mark.slow
@on_ranks(2, given=["backend"])
def test_a_new_broadcast_keeps_the_gradients_accumulated_on_each_rank() -> None:
    from keras_models import data, distance, exact, fit

    # Every fit() takes four passes, and has another callback for the broadcast.
    model, alone = exact(seed=1), exact(seed=1)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)))
    alone.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    for _ in range(3):
        fit(model, dtype="float64")
        alone.fit(*data("float64"), batch_size=16, epochs=1, shuffle=False, verbose=0)
    assert distance(model.get_weights(), alone.get_weights()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"average_aggregated_gradients": True}], ids=["sum", "average"])
@on_ranks(2, given=["backend"])
def test_gradients_of_several_passes_make_one_update(options: dict[str, Any]) -> None:
    from keras_models import data, distance, exact, fit

    model, alone = exact(seed=1), exact(seed=1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2, **options)
    model.compile(optimizer)
    fit(model, dtype="float64")
    rate = 0.1 if options else 0.2
    alone.compile(keras.optimizers.SGD(rate))
    alone.fit(*data("float64"), batch_size=32, epochs=1, shuffle=False, verbose=0)
    assert int(np.asarray(optimizer.iterations)) == 2  # of four passes
    assert (
        distance(model.get_weights(), alone.get_weights()) < 1e-8
    )  # the learning rate is a float32, and its double is not


@pytest.mark.slow
@on_ranks(2, given=["backend"])
def test_arguments_of_the_optimizer_do_what_they_say() -> None:
    from keras_models import distance, is_same_everywhere, shard

    random = np.random.default_rng(0)
    words, targets = random.integers(0, 20, size=(64, 4)), random.normal(size=(64, 3)).astype("float32")

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        return keras.Sequential([keras.layers.Input((4,), dtype="int32"), *layers])

    one = model()
    one.compile(keras.optimizers.SGD(0.1), "mse")
    one.fit(words, targets, batch_size=16, shuffle=False, verbose=0)
    for options in (
        {"gradient_predivide_factor": 2.0},
        {"sparse_as_dense": True, "groups": 2},
        {"op": hvd.Sum, "compression": hvd.Compression.fp16},
    ):
        both = model()
        rate = 0.05 if "op" in options else 0.1
        both.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options), "mse")
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        both.fit(shard(words), shard(targets), batch_size=8, shuffle=False, verbose=0, callbacks=[broadcast])
        assert is_same_everywhere(both.get_weights()), options
        most = 1e-3 if "compression" in options else 1e-6
        assert distance(one.get_weights(), both.get_weights()) < most, options
