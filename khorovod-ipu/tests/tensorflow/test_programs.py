"""Loops and programs over a strategy: models of Keras 3, pipelines, the functions beside the strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import run_ranks


def _keras() -> list[Any]:
    import keras
    import tensorflow as tf

    from khorovod_ipu.tensorflow import software
    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    software.prepare()
    strategy = IPUHorovodStrategy()
    rank, size = strategy.extended._collectives.rank, strategy.num_replicas_in_sync
    keras.utils.set_random_seed(rank)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    inputs = np.arange(48, dtype="float32").reshape(2, 6, 4) % 7 - 3

    @tf.function(jit_compile=True)  # as in scripts of the SDK; TensorFlow's compiler knows no reductions over workers
    def step(x: Any) -> Any:
        def replica(x: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = tf.reduce_sum((model(x) - 1.0) ** 2, -1)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=6)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(replica, (x,)))

    part = 6 // size
    losses = [float(step(tf.constant(batch[rank * part : (rank + 1) * part]))) for batch in inputs]
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.01), "mse")
    rows = tf.data.Dataset.from_tensor_slices((inputs.reshape(12, 4), np.ones((12, 1), "float32"))).batch(6)
    fitted = model.fit(rows, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [losses, fitted, model.evaluate(rows, verbose=0), *(v.numpy().tolist() for v in model.trainable_variables)]


@pytest.mark.slow
def test_a_model_of_keras_3_learns_what_one_worker_learns_from_the_whole_batch_in_a_loop_and_by_fit() -> None:
    (alone,) = run_ranks(1, _keras, framework="keras-tensorflow")
    both = run_ranks(2, _keras, framework="keras-tensorflow")
    for trained in both:
        for ours, theirs in zip(trained, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def _keras_in_an_estimator(folder: str) -> list[Any]:
    import keras
    import tensorflow as tf

    from khorovod_ipu.tensorflow import estimator, software
    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    v1 = tf.compat.v1
    software.prepare()

    def model(features: Any, labels: Any, mode: str) -> Any:
        layers = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        found = layers(features)
        loss = tf.reduce_mean((found - labels) ** 2)
        if mode == "eval":
            return estimator.EstimatorSpec(mode, found, loss)
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        pairs = optimizer.compute_gradients(loss, var_list=layers.trainable_variables)

        def on_host(*gradients: Any) -> Any:
            return optimizer.apply_gradients(zip(gradients, layers.trainable_variables, strict=True))

        call = (on_host, [gradient for gradient, _ in pairs])
        return estimator.IPUEstimatorSpec(mode, None, loss, tf.identity(loss), host_call=call)

    def data() -> Any:
        return tf.data.Dataset.from_tensors((np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))).repeat()

    strategy = IPUHorovodStrategy(variables_on_host=True)
    config = estimator.RunConfig(model_dir=folder, train_distribute=strategy, log_step_count_steps=None)
    trained = estimator.IPUEstimator(model, config=config)
    before = keras.backend.get_uid("dense")
    train, evaluate = estimator.TrainSpec(data, max_steps=60), estimator.EvalSpec(data, steps=1)
    found, _ = estimator.train_and_evaluate(trained, train, evaluate)
    return [found and float(found["loss"]), keras.backend.get_uid("dense") - before]


@pytest.mark.slow
def test_an_estimator_trains_a_model_of_keras_3_and_finds_its_weights_when_it_evaluates(tmp_path: Path) -> None:
    first, second = run_ranks(2, _keras_in_an_estimator, str(tmp_path), framework="keras-tensorflow")
    assert first[0] < 0.01 and second[0] is None
    assert first[1] == second[1] == 1, "names outside of the Estimator are counted as if it were not there"


def _program() -> dict[str, Any]:
    import tensorflow as tf
    from tensorflow.python.ipu import ipu_compiler, ipu_infeed_queue, ipu_outfeed_queue, loops, pipelining_ops

    import khorovod_ipu.tensorflow  # noqa: F401 - makes the next line work without an installation
    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    v1 = tf.compat.v1
    found: dict[str, Any] = {}
    with tf.Graph().as_default():
        strategy = IPUHorovodStrategy()
        collectives = strategy.extended._collectives
        calls: list[int] = []
        plain = collectives.reduce

        def counted(tensor: Any, mean: bool) -> Any:
            done = tf.numpy_function(lambda: np.int64(calls.append(1) or 0), [], tf.int64)
            with tf.control_dependencies([done]):
                return plain(tf.identity(tensor), mean)

        collectives.reduce = counted
        rank = collectives.rank
        infeed = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(tf.constant([rank + 1.0])).repeat())
        outfeed = ipu_outfeed_queue.IPUOutfeedQueue()
        other = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.range(100))

        def first(x: Any) -> Any:
            return x * v1.get_variable("a", initializer=1.0)

        def second(x: Any) -> Any:
            return tf.reduce_sum(x * v1.get_variable("b", initializer=2.0))

        def optimizer(loss: Any) -> Any:
            return pipelining_ops.OptimizerFunctionOutput(v1.train.GradientDescentOptimizer(0.01), loss)

        def program() -> Any:
            return pipelining_ops.pipeline(
                [first, second], gradient_accumulation_count=3, repeat_count=4, infeed_queue=infeed,
                outfeed_queue=outfeed, optimizer_function=optimizer, device_mapping=[0, 0],
                pipeline_schedule=pipelining_ops.PipelineSchedule.Interleaved,
                recomputation_mode=pipelining_ops.RecomputationMode.RecomputeThenBackpropagate,
            )  # fmt: skip

        for refused in ({"reduction_method": "mean"}, {"accumulate_outfeed": True}, {"outfeed_mask": [False, True]}):
            with pytest.raises(NotImplementedError, match=f"{next(iter(refused))}=.* is not imitated"):
                pipelining_ops.pipeline([first, second], 3, infeed_queue=infeed, **refused)
        with pytest.raises(TypeError, match="has no argument 'gradient_acumulation_count'"):
            pipelining_ops.pipeline([first, second], gradient_acumulation_count=3)
        with pytest.raises(NotImplementedError, match="io_batch_size=2 is not imitated"):
            ipu_outfeed_queue.IPUOutfeedQueue(io_batch_size=2)
        with pytest.raises(ValueError, match="'last' is not a valid IPUOutfeedMode"):
            ipu_outfeed_queue.IPUOutfeedQueue(outfeed_mode="last")
        for queue in (
            lambda count: ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.range(2), replication_factor=count),
            lambda count: ipu_outfeed_queue.IPUOutfeedQueue(replication_factor=count),
        ):
            queue(1)
            with pytest.raises(NotImplementedError, match="replication_factor=2 is not imitated"):
                queue(2)

        with strategy.scope():
            launch = strategy.run(lambda: ipu_compiler.compile(program, []))
        summed = ipu_compiler.compile(
            lambda: loops.repeat(4, lambda total, x: total + tf.cast(x, tf.float32), [0.0], other), []
        )
        found["one value is not a list"] = loops.repeat(2, lambda total: total + 1.0, [0.0]).shape.rank == 0
        fed = outfeed.dequeue(wait_for_completion=True)

        def step() -> Any:
            # With a global step, minimize() returns something that is neither a tensor nor an operation.
            loss = tf.square(v1.get_variable("c", initializer=1.0))
            trained = v1.train.GradientDescentOptimizer(0.125).minimize(loss, v1.train.get_or_create_global_step())
            return loss, trained

        with strategy.scope():
            (stepped,) = strategy.run(lambda: ipu_compiler.compile(step, []))
        with v1.Session() as session:
            session.run([infeed.initializer, other.initializer])
            session.run(v1.global_variables_initializer())
            session.run(launch)
            found["reductions"] = len(calls)
            found["weights"] = session.run(v1.global_variables()[:2])
            found["variables"] = [variable.name for variable in v1.global_variables()]
            found["losses"] = session.run(fed)
            found["summed"] = session.run(summed)
            found["again"] = session.run(summed)
            found["stepped"] = [session.run(stepped), session.run(stepped), session.run(v1.train.get_global_step())]
    return found


def test_a_pipeline_is_one_launch_with_two_reductions_per_repeat() -> None:
    a, b = 1.0, 2.0
    losses: list[tuple[float, float]] = []
    for _ in range(4):
        losses += [(a * b, 2 * a * b)] * 3
        a, b = a - 0.01 * 3 * 3 * b, b - 0.01 * 3 * 3 * a
    for rank, found in enumerate(run_ranks(2, _program, framework="tf_keras")):
        assert found["reductions"] == 2 * 4 and found["one value is not a list"]
        assert found["variables"] == ["a:0", "b:0", "c:0", "global_step:0"]
        np.testing.assert_allclose(found["weights"], [a, b], rtol=1e-5)
        np.testing.assert_allclose(found["losses"], [pair[rank] for pair in losses], rtol=1e-5)
        assert found["summed"] == [6.0] and found["again"] == [22.0]
        assert found["stepped"] == [1.0, (1 - 0.125 * 2 * 2.0) ** 2, 2]  # not in an Estimator: the sum over the workers


def _functions() -> list[Any]:
    import tensorflow as tf
    from tensorflow.python.ipu import distributed
    from tensorflow.python.ipu import horovod as hvd

    import khorovod_ipu.tensorflow  # noqa: F401

    rank = hvd.rank()
    found: list[Any] = [float(hvd.allreduce(tf.constant(float(rank)))), float(hvd.allreduce(tf.constant(1.0), hvd.Sum))]
    found += [hvd.allgather(tf.constant([rank])).numpy().tolist(), int(hvd.broadcast(tf.constant(rank), 1))]
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(tf.constant(1.0), op=hvd.Adasum)
    found += [distributed.allgather(tf.constant([rank, 7])).numpy().tolist()]
    found += [int(distributed.broadcast(tf.constant(rank), 1)), float(distributed.allreduce(tf.constant(2.0), "MEAN"))]
    for call in (lambda call: call(), lambda call: tf.function(call)()):
        with pytest.raises(tf.errors.InvalidArgumentError, match="Tensor layouts did not match on all instances"):
            call(lambda: distributed.allreduce(tf.ones([rank + 1])))
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"rank 1: \[2\]  allreduce at .*test_programs\.py:"):
        tf.function(lambda: hvd.allreduce(tf.ones([rank + 1])))()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        # Matched by the names of the nodes: the order of the calls does not matter.
        order = ("x", "y") if rank else ("y", "x")
        sums = {name: distributed.allreduce(tf.constant(float(rank)), tensor_name=name) for name in order}
        found.append(session.run(sums))
        # Without names of the calls those of the tensors count; one tensor may take part twice.
        tensors = {name: tf.constant([float(rank), place], name=name) for place, name in enumerate("xy")}
        calls = (distributed.allgather, distributed.allreduce, lambda x: distributed.broadcast(x, 1))
        gathered = {(name, place): call(tensors[name]) for name in order for place, call in enumerate([*calls, *calls])}
        values = {key: value.tolist() for key, value in session.run(gathered).items()}
        for place, name in enumerate("xy"):
            expected = [[[0, place], [1, place]], [1, 2 * place], [1, place]]
            assert [values[name, number] for number in range(6)] == 2 * expected
    return found


def test_the_functions_beside_the_strategies() -> None:
    for found in run_ranks(2, _functions, framework="tf_keras"):
        assert found == [0.5, 2.0, [0, 1], 1, [[0, 7], [1, 7]], 1, 2.0, {"x": 1.0, "y": 1.0}]
