"""Elastic training in TensorFlow: what a loss leaves behind in eager steps, functions and compiled functions."""

from __future__ import annotations

from typing import Any

import pytest
from by_hand import weights_by_hand
from elastic_job import ElasticJob
from harness import on_ranks

from horovod.core.membership_events import Policy
from horovod.errors import RequestError

MODES = ("eager", "function", "jit")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), [*((mode, "model") for mode in MODES), ("function", "variables")])
@on_ranks(1, framework="tensorflow")
def test_a_failed_step_has_no_effect(mode: str, kind: str) -> None:
    """A step that changes its own count, an average and a random state before the gradients are there."""
    import numpy as np
    import tensorflow as tf
    from losing import losing

    import horovod.tensorflow as hvd

    x = np.random.default_rng(0).normal(size=(6, 8, 4)).astype("float32")

    def trained(which: tuple[int, ...]) -> Any:
        tf.keras.utils.set_random_seed(1)
        layers = tf.keras.layers
        model = tf.keras.Sequential([
            layers.Input((4,)), layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1),
        ])  # fmt: skip
        optimizer = tf.keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

        def compute(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - tf.reduce_sum(x, 1, keepdims=True)))
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        step = compute if mode == "eager" else tf.function(compute, jit_compile=mode == "jit")

        @hvd.elastic.step
        def one(state: Any) -> None:
            step(tf.constant(x[state.batch]))
            state.batch += 1

        @hvd.elastic.run
        def train(state: Any) -> None:
            while state.batch < 3:
                one(state)
            if not state.committed:
                state.committed = True
                state.commit()
            while state.batch < 6:  # not a step: after a loss the commit is restored
                one.__wrapped__(state)

        variables = [*model.variables, *optimizer.variables]
        if kind == "model":
            state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, committed=False)
        else:
            state = hvd.elastic.TensorFlowState(variables, batch=0, committed=False)
        with losing(which) as losses:
            train(state)
        assert losses.count == len(which)
        assert state.batch == 6
        return [variable.numpy() for variable in variables]

    wanted = trained(())
    for value, other in zip(trained((1, 3, 7)), wanted, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tape", "keras"])
@on_ranks(1, framework="tensorflow")
def test_no_variable_changes_before_all_gradients_have_arrived(kind: str) -> None:
    """Look in a graph for collectives that a change of a variable does not wait for."""
    import tensorflow as tf
    from losing import losing

    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras as hvd_keras

    table, tables, dense = tf.Variable(tf.ones((9, 4))), tf.Variable(tf.ones((9, 4))), tf.Variable(tf.ones((4, 1)))
    variables = [table, tables, dense]

    @tf.function(autograph=False)
    def step(rows: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.gather(table, rows) + tf.gather(tables, rows)) @ dense)
        if kind == "keras":
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return
        first, second, third = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        table.scatter_sub(first)
        tables.scatter_sub(second)
        dense.assign_sub(third)

    def before(operation: Any) -> set[Any]:
        found, more = set(), [operation]
        while more:
            one = more.pop()
            if one not in found:
                found.add(one)
                more += [*one.control_inputs, *(tensor.op for tensor in one.inputs)]
        return found

    with losing(()):
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.5))
        optimizer.build(variables)
        made = hvd.elastic.run(lambda state: step.get_concrete_function(tf.constant([3])))
        operations = made(hvd.elastic.TensorFlowState(variables)).graph.get_operations()
    collectives = {each for each in operations if each.type.startswith("Horovod") and "all" in each.type.lower()}
    changes = [each for each in operations if each.type in ("ResourceScatterSub", "AssignSubVariableOp")]
    assert (len(collectives), len(changes)) == (2 if kind == "keras" else 3, 3)
    assert all(collectives <= before(change) for change in changes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "function"])
@on_ranks(1, framework="tensorflow")
def test_a_step_that_fails_after_its_update_goes_back_to_the_commit(mode: str) -> None:
    """The mean of the loss is reduced after the update, and fails in the third step."""
    import numpy as np
    import tensorflow as tf
    from losing import losing

    import horovod.tensorflow as hvd

    frozen = [tf.Variable(tf.zeros(1)) for _ in range(20)]
    table, moment = tf.Variable(tf.zeros((50, 2))), tf.Variable(tf.zeros((50, 2)), trainable=False)

    def compute() -> None:
        moment.assign(0.5 * moment + hvd.allreduce(tf.ones((50, 2)), op=hvd.Average, name="gradient"))
        table.assign_add(moment)

    compute = compute if mode == "eager" else tf.function(compute)
    state = hvd.elastic.TensorFlowState([*frozen, table, moment], batch=0)

    @hvd.elastic.step
    def one(state: Any) -> None:
        compute()
        hvd.allreduce(tf.reduce_sum(table), name="loss")
        state.batch += 1

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < 4:
            one(state)

    with losing((6,)) as losses:
        train(state)
    assert (losses.count, state.batch) == (1, 4)
    np.testing.assert_array_equal(table.numpy(), np.full((50, 2), 1 + 1.5 + 1.75 + 1.875))


def _train(mode: str) -> dict[str, Any]:
    """A linear model whose weights can be computed by hand; rank 1 dies in the third step, and another one joins."""
    import numpy as np
    import tensorflow as tf
    from losing import dying

    import horovod.tensorflow as hvd

    hvd.init()
    x = np.random.default_rng(0).normal(size=(100, 3)).astype("float32")
    y = (x @ np.array([[1.0], [2.0], [3.0]])).astype("float32")
    weights = tf.Variable(tf.zeros((3, 1)))
    count = tf.Variable(0, trainable=False)
    traces: list[int] = []

    def compute(x: Any, y: Any) -> None:
        traces.append(1)
        count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights - y))
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weights])
        weights.assign_sub(0.1 * gradient)

    step = tf.function(compute, jit_compile=mode == "jit", reduce_retracing=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    state = hvd.elastic.TensorFlowState([weights, count], data=hvd.elastic.shard(dataset, batch_size=4), sizes=[])

    @hvd.elastic.step
    def one(state: Any, batch: Any) -> None:
        step(*batch)
        state.sizes = [*state.sizes, hvd.size()]

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.data.set_epoch(0)
        for batch in state.data:
            one(state, batch)

    with dying(3):
        train(state)
    return {"weights": weights.numpy(), "count": int(count), "sizes": state.sizes, "traces": len(traces), "xy": (x, y)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["function", "jit"])
def test_a_killed_rank_loses_no_sample(mode: str) -> None:
    import numpy as np

    policy = Policy(3, minimum=2)
    with ElasticJob(_train, policy, {"a": 3}, args=(mode,), framework="tensorflow") as job:
        values = list(job.values().values())
    assert len(values) == 2
    weights = weights_by_hand(*values[0]["xy"], values[0]["sizes"], [0.1])
    for value in values:
        assert value["sizes"] == [3, 3] + [2] * 10
        assert value["count"] == 12
        np.testing.assert_allclose(value["weights"], weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(value["weights"], values[0]["weights"])


def _asked(mode: str) -> Any:
    """Rank 1 of three dies in the third step, and another one joins, for which programs are traced anew."""
    import numpy as np
    import tensorflow as tf
    from losing import dying

    import horovod.tensorflow as hvd

    hvd.init()
    layer = hvd.SyncBatchNormalization(momentum=0.5, name="norm")
    layer.build((None, 2))
    shared, own = tf.Variable(1.0), tf.Variable(1.0)

    def compute(x: Any) -> Any:
        layer(x, training=True)
        tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True), scale_local_gradients=True)
        tape.register_local_source(own)
        with tape:
            loss = shared * own * 6.0
        with tf.GradientTape() as second:
            product = shared * hvd.broadcast(shared, 0)
        answers = [tf.reduce_sum(tf.ones(hvd.size_op())), hvd.rank_op()]
        return [*answers, tape.gradient(loss, [shared, own])[1], second.gradient(product, shared)]

    def now(rank: int, size: int) -> list[float]:
        return [size, rank, 6 / size, 1 + (rank == 0)]

    step = tf.function(compute, jit_compile=mode == "jit")
    state = hvd.elastic.TensorFlowState([*layer.variables, shared, own], sizes=[])

    def data(number: int, size: int, rank: int) -> Any:
        return np.random.default_rng([number, size, rank]).normal(5 * rank, 1 + rank, (4, 2)).astype("float32")

    @hvd.elastic.step
    def one(state: Any) -> None:
        found = step(tf.constant(data(len(state.sizes), hvd.size(), hvd.rank())))
        assert [float(each) for each in found] == now(hvd.rank(), hvd.size())
        state.sizes = [*state.sizes, hvd.size()]

    @hvd.elastic.run
    def train(state: Any) -> None:
        while len(state.sizes) < 5 or state.sizes[-1] < 3:
            one(state)

    with dying(7):
        train(state)
    mean, variance = np.zeros(2), np.ones(2)
    for number, size in enumerate(state.sizes):
        x = np.concatenate([data(number, size, rank) for rank in range(size)]).astype(float)
        mean, variance = (mean + x.mean(0)) / 2, (variance + x.var(0)) / 2
    np.testing.assert_allclose([layer.moving_mean, layer.moving_variance], [mean, variance], rtol=1e-5)
    return state.sizes


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["function", "jit"])
def test_a_program_asks_for_rank_and_size_at_each_call(mode: str) -> None:
    with ElasticJob(_asked, Policy(3, 2, cool_down_s=(0, 0)), {"a": 3}, args=(mode,), framework="tensorflow") as job:
        (sizes, *others) = job.values().values()
    assert others == [sizes] * 2
    assert set(sizes) == {2, 3}


def _scattered() -> str:
    """Rank 1 of three dies in the second step, after which the two others get more rows each."""
    import tensorflow as tf
    from losing import dying

    import horovod.tensorflow as hvd

    hvd.init()
    step = tf.function(lambda x: hvd.reducescatter(hvd.allreduce(x, op=hvd.Sum), op=hvd.Sum), jit_compile=True)

    @hvd.elastic.step
    def one(state: Any) -> None:
        step(tf.ones((6, 2)))

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            one(state)

    with dying(2):
        try:
            train(hvd.elastic.TensorFlowState([tf.Variable(0)]))
        except RequestError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_a_compiled_reducescatter_for_another_number_of_ranks_is_an_error() -> None:
    with ElasticJob(_scattered, Policy(3, 2), {"a": 3}, framework="tensorflow") as job:
        errors = list(job.values().values())
    assert len(errors) == 2
    assert all("the shapes [(2, 2)], and with 2 ranks they are [(3, 2)]" in error for error in errors)


@on_ranks(1, framework="tensorflow")
def test_a_dataset_gives_each_sample_once_or_is_refused() -> None:
    """Also of datasets whose elements are computed by Python, sparse or ragged; and no element is computed twice."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    dataset, made = tf.data.Dataset, list[int]()

    def note(number: Any) -> Any:
        made.append(int(number))
        return number

    def sample(number: Any) -> Any:
        number = tf.ensure_shape(tf.py_function(note, (number,), tf.int64), ())
        words = tf.RaggedTensor.from_row_lengths(tf.range(3), [1, 2])
        return {"words": words, "bag": tf.sparse.from_dense([0, number]), "number": number}

    numbers = dataset.range(37).shuffle(37, seed=1, reshuffle_each_iteration=False)
    shard = hvd.elastic.shard(numbers.map(sample, num_parallel_calls=2), batch_size=4)
    seen = []
    for batch in shard:
        count = len(batch["number"])
        assert batch["words"].shape == (count, 2, None)
        assert tf.sparse.to_dense(batch["bag"])[:, 1].numpy().tolist() == batch["number"].numpy().tolist()
        seen.append(batch["number"].numpy().tolist())
    assert [len(each) for each in seen] == [4] * 8 + [5]
    assert [number for each in seen for number in each] == list(numbers.as_numpy_iterator())
    assert sorted(made) == list(range(37))

    tf.random.set_seed(None)  # with one, a shuffle without a seed has a fixed order
    options = tf.data.Options()
    options.deterministic = False
    for unsteady in (
        dataset.range(9).shuffle(9, seed=1),
        dataset.range(9).shuffle(9, reshuffle_each_iteration=False),
        dataset.zip(dataset.range(9), dataset.range(9).shuffle(9)).prefetch(1),
        dataset.range(9).map(lambda x: x, num_parallel_calls=2, deterministic=False),
        dataset.range(9).with_options(options),
        dataset.list_files("/etc/*"),
        dataset.range(9).interleave(lambda _: dataset.range(9), num_parallel_calls=2, deterministic=False).prefetch(1),
        dataset.range(9).interleave(lambda _: dataset.range(9).shuffle(9), num_parallel_calls=2),
        dataset.range(9).flat_map(lambda _: dataset.range(9).shuffle(9, reshuffle_each_iteration=False)),
        dataset.sample_from_datasets([dataset.range(9), dataset.range(9)]),
        dataset.random(seed=1, rerandomize_each_iteration=True).take(9),
    ):
        with pytest.raises(ValueError, match="another order in each iteration or on each rank"):
            hvd.elastic.shard(unsteady, batch_size=4)
    # Each call of the function makes its data set anew, so the seed is enough there.
    nested = dataset.range(9).flat_map(lambda _: dataset.range(9).shuffle(9, seed=1)).interleave(
        lambda each: dataset.from_tensors(each), num_parallel_calls=2
    )  # fmt: skip
    batches = [batch.numpy().tolist() for _ in range(2) for batch in hvd.elastic.shard(nested, batch_size=81)]
    assert batches[0] == batches[1]
    assert sorted(batches[0]) == sorted(list(range(9)) * 9)
    hvd.elastic.shard(dataset.sample_from_datasets([dataset.range(9), dataset.range(9)], seed=1), batch_size=4)
