"""Distributed optimizers in use: loss scaling, files, loops of one's own, and wrong arguments."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import on_ranks
from later import later

from horovod.errors import MismatchError

hvd, keras = later("horovod.keras"), later("keras")


@pytest.mark.slow
@on_ranks(2, returns=[[True, 2.0**14] * 2] * 2, given=["backend"])
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> list[Any]:
    from keras_models import data, is_same_everywhere, shard, small

    x, y = map(shard, data())
    if hvd.rank() == 1:
        x[8:16] *= 1e30  # overflows on one rank, in the second step
    found = []
    make = keras.optimizers.SGD
    keras.config.set_dtype_policy("mixed_float16")
    try:
        # compile() puts loss scaling around the first one, the second one has it inside.
        for optimizer in (make(0.1), keras.optimizers.LossScaleOptimizer(make(0.1, gradient_accumulation_steps=2))):
            model = small(seed=0)
            model.compile(hvd.DistributedOptimizer(optimizer), "mse")
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            found += [is_same_everywhere(model.get_weights()), float(np.asarray(model.optimizer.dynamic_scale))]
    finally:
        keras.config.set_dtype_policy("float32")
    return found


@pytest.mark.slow
@on_ranks(3, returns=[(True, False), (False, True), (True, False)], given=["backend"])
def test_ranks_of_a_process_set_train_together_and_others_alone() -> tuple[bool, bool]:
    from keras_models import data, distance, small

    ranks = hvd.add_process_set([0, 2])
    x, y = (values[hvd.rank() * 16 :][:16] for values in data())
    models = [small(seed=0), small(seed=0)]
    models[0].compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=ranks), "mse")
    models[1].compile(keras.optimizers.SGD(0.1), "mse")
    for model in models:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    trained, alone = (model.get_weights() for model in models)
    everybody = hvd.allgather_object(trained)
    return distance(trained, everybody[0]) == 0.0, distance(trained, alone) < 1e-6


@pytest.mark.slow
@on_ranks(3, returns=[True] * 3, given=["backend"])
def test_all_ranks_train_together_after_some_of_them_have() -> bool:
    from keras_models import data, is_same_everywhere, small

    x, y = (values[hvd.rank() * 16 :][:16] for values in data())
    for ranks in ([0, 2], [1, 2], None):
        members = hvd.add_process_set(ranks) if ranks else hvd.global_process_set
        model = small(seed=0)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=members), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        hvd.remove_process_set(members)  # the next one gets its id
    return is_same_everywhere(model.get_weights())


@pytest.mark.slow
@on_ranks(2, returns=[[True] * 7] * 2, given=["backend"])
def test_files_name_the_plain_optimizer_and_go_on_as_a_distributed_one(tmp_path: Path) -> list[bool]:
    from keras_models import fit, is_same_everywhere, small

    from horovod._keras.members import DistributedMembers

    path = tmp_path / f"{hvd.rank()}.keras"
    model, plain = small(seed=0), keras.optimizers.Adam(0.01)
    written = keras.saving.serialize_keras_object(plain)
    model.compile(hvd.DistributedOptimizer(plain), "mse")
    fit(model)
    model.save(path)
    alone, loaded = keras.saving.load_model(path), hvd.load_model(path)
    fit(loaded)
    with zipfile.ZipFile(path) as file:
        text = file.read("config.json").decode()
    return [
        "horovod" not in text,
        {**keras.saving.serialize_keras_object(plain), "build_config": 0} == {**written, "build_config": 0},
        not isinstance(alone.optimizer, DistributedMembers),
        int(np.asarray(alone.optimizer.iterations)) == 4,
        isinstance(loaded.optimizer, DistributedMembers | keras.optimizers.Adam),
        int(np.asarray(loaded.optimizer.iterations)) == 8,
        is_same_everywhere(loaded.get_weights()),
    ]


def _step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """As in Keras' guides for custom training."""
    if keras.backend.backend() == "torch":
        import torch

        model.zero_grad()
        model.compute_loss(y=torch.tensor(y), y_pred=model(x)).backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y, y_pred=model(x))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights, strict=True)
        )
    else:
        import jax

        def compute(trainable: Any, rest: Any) -> Any:
            return model.compute_loss(y=y, y_pred=model.stateless_call(trainable, rest, x)[0])

        trainable = [v.value for v in model.trainable_variables]
        grads = jax.grad(compute)(trainable, [v.value for v in model.non_trainable_variables])
        state = [v.value for v in optimizer.variables]
        new, state = jax.jit(optimizer.stateless_apply)(state, grads, trainable)
        for variable, value in zip([*model.trainable_variables, *optimizer.variables], [*new, *state], strict=True):
            variable.assign(value)


@pytest.mark.slow
@on_ranks(2, given=["backend"])
def test_a_loop_of_ones_own_trains_as_one_process() -> None:
    from keras_models import BATCH, data, distance, exact, shard

    x, y = data("float64")
    model, alone = exact(seed=1 + hvd.rank()), exact(seed=1)
    hvd.broadcast_variables(model.weights, root_rank=0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    plain = keras.optimizers.Adam(0.01)
    for some, net, inputs, targets in (
        (optimizer, model, shard(x)[: BATCH // hvd.size()], shard(y)[: BATCH // hvd.size()]),
        (plain, alone, x[:BATCH], y[:BATCH]),
    ):
        some.build(net.trainable_variables)
        for _ in range(2):
            _step(net, some, inputs, targets)
    assert distance(model.get_weights(), alone.get_weights()) < 1e-12


@pytest.mark.slow
@on_ranks(2, framework="keras-torch")
def test_a_step_that_torch_compiles_combines_gradients() -> None:
    """torch.compile went past the distributed class, as optimizers show the plain one: each rank trained alone."""
    import torch

    variable = keras.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    optimizer.build([variable])

    @torch.compile(backend="eager")  # looks at the program as ever, and makes no machine code of it
    def step(gradient: Any) -> None:
        with torch.no_grad():
            optimizer.apply([gradient * 2], [variable])

    step(torch.full((2,), 1.0 + hvd.rank()))
    assert optimizer._momentums[0].numpy().tolist() == pytest.approx([0.3, 0.3])


@on_ranks(2, given=["backend"])
def test_values_of_all_ranks_are_combined() -> None:
    rank = hvd.rank()
    found = [
        hvd.allreduce(1.0 * rank),
        hvd.allreduce(np.float32(rank), average=False),
        hvd.allreduce([1.0, rank], op=hvd.Max),
        hvd.allgather([rank]),
        hvd.broadcast(rank, 1),
        hvd.reducescatter([1.0, 2.0, 3.0, 4.0], op=hvd.Sum),
    ]
    scattered = [6.0, 8.0] if rank else [2.0, 4.0]
    assert [np.asarray(value).tolist() for value in found] == [0.5, 1.0, [1.0, 1.0], [0, 1], 1, scattered]


@on_ranks(2, given=["backend"])
def test_wrong_arguments_are_told_with_their_line() -> None:
    sgd = keras.optimizers.SGD
    for word, wrong in {
        "one of Keras": lambda: hvd.DistributedOptimizer(3),
        "Average or Sum": lambda: hvd.DistributedOptimizer(sgd(0.1), op=hvd.Adasum),
        "needs op=Average": lambda: hvd.DistributedOptimizer(sgd(0.1), op=hvd.Sum, gradient_predivide_factor=2.0),
        "1 or more": lambda: hvd.DistributedOptimizer(sgd(0.1), backward_passes_per_step=0),
        "leave out backward_passes": lambda: hvd.DistributedOptimizer(
            sgd(0.1, gradient_accumulation_steps=3), backward_passes_per_step=2
        ),
        "groups": lambda: hvd.DistributedOptimizer(sgd(0.1), groups="all"),
        "local_layers": lambda: hvd.PartialDistributedOptimizer(sgd(0.1), local_layers=[3]),
        "no variables yet": lambda: hvd.PartialDistributedOptimizer(sgd(0.1), local_layers=keras.layers.Dense(3)),
        "initial_lr": lambda: hvd.callbacks.LearningRateScheduleCallback(None, 0.1),
        "local variable": lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3]),
        "broadcast_variables(": lambda: hvd.broadcast_global_variables(0),
        "such as model.weights. Received: Dense": lambda: hvd.broadcast_variables(keras.layers.Dense(3), 0),
        "such as model.weights. Received: Variable": lambda: hvd.broadcast_variables(keras.Variable([1.0]), 0),
        "only rank 0 has: v1": lambda: hvd.broadcast_variables(
            [keras.Variable(1.0, name=f"v{n}") for n in range(2 - hvd.rank())], 0
        ),
    }.items():
        with pytest.raises((ValueError, MismatchError)) as caught:
            wrong()
        assert word in str(caught.value)
        assert "test_optimizer_use.py:" in str(caught.value)
    with pytest.raises(ValueError, match="must be a ProcessSet"):
        hvd.DistributedOptimizer(sgd(0.1), process_set=[0, 1])
    with pytest.raises(TypeError, match=r"^LearningRateWarmupCallback.__init__\(\) missing .*'initial_lr'"):
        hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=5, verbose=1)  # as in old scripts
