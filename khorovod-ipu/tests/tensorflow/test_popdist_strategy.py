"""PopDistStrategy: replicas of an instance and instances of one replica give the same numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks


def _as_instance(local: int) -> int:
    """Put into the environment what poprun does; return the number of this instance's first replica."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    values = {"NUM_TOTAL_REPLICAS": size * local, "NUM_LOCAL_REPLICAS": local, "REPLICA_INDEX_OFFSET": rank * local}
    os.environ.update({f"POPDIST_{name}": str(value) for name, value in values.items()})
    return rank * local


def _numbers(local: int, folder: str) -> dict[str, Any]:
    import tensorflow as tf

    import popdist
    from khorovod_ipu.tensorflow.strategies import PopDistStrategy

    first = _as_instance(local)
    try:
        strategy = PopDistStrategy()
        found: dict[str, Any] = {"in sync": strategy.num_replicas_in_sync}
        on_read, mean = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.MEAN
        with strategy.scope():
            w = tf.Variable(float(first + 1), aggregation=mean)  # the first instance's value counts
            moving = tf.Variable(0.0, trainable=False, synchronization=on_read, aggregation=mean)
            momentum = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)

        @tf.function
        def step(batch: Any) -> Any:
            def replica(x: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(w * x - 1.0)) / 16  # of the global batch
                moving.assign(tf.reduce_mean(x))
                momentum.apply_gradients([(tape.gradient(loss, w), w)])
                return loss

            return strategy.reduce("SUM", strategy.run(replica, (batch,)))

        def data(context: Any) -> Any:
            rows = tf.data.Dataset.range(32).map(lambda i: tf.cast(i, tf.float32) / 32)
            part = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return part.batch(context.get_per_replica_batch_size(16))

        found["losses"] = [float(step(batch)) for batch in strategy.distribute_datasets_from_function(data)]
        found["w"] = [float(one) for one in strategy.experimental_local_results(w)]
        found["moving"] = float(moving.read_value())
        batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(16).batch(8))
        square = tf.function(lambda x: strategy.reduce("SUM", strategy.run(lambda x: tf.reduce_sum(x * x), (x,))))
        found["squares"] = [int(square(batch)) for batch in batches]
        numbers = strategy.experimental_distribute_values_from_function(
            lambda c: tf.constant([c.replica_id_in_sync_group])
        )
        found["numbers"] = strategy.gather(numbers, 0).numpy().tolist()
        found["mean"] = float(strategy.reduce("MEAN", strategy.run(lambda n: tf.cast(n[0], tf.float32), (numbers,))))
        found["one"] = float(strategy.reduce("SUM", tf.constant(1.0)))
        found["looped"] = _looped(strategy)
        found["alone"] = _left_alone(first)
        found["program"] = _program(first // local)
        found["estimated"] = _estimated(f"{folder}/{first}") if local > 1 else None
        return found
    finally:
        popdist.finalizeBackend()
        for name in [name for name in os.environ if name.startswith("POPDIST_")]:
            del os.environ[name]


def _looped(strategy: Any) -> list[float]:
    """A loop and a branch of TensorFlow inside of the step: both meet the other replicas; so does the next batch."""
    import tensorflow as tf

    with strategy.scope():
        w = tf.Variable(1.0)
        descent = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    data = tf.data.Dataset.range(32).map(lambda i: tf.cast(i, tf.float32) / 32).batch(8)

    @tf.function
    def train(batches, count):  # type: ignore[no-untyped-def] # AutoGraph reads it again, where there is no Any
        seen = tf.constant(0.0)
        for step in tf.range(count):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(w * next(batches) - 1.0)) / 8
            gradient = tape.gradient(loss, w)
            if step % 2 == 1:
                descent.apply_gradients([(gradient, w)])
            seen += loss
        return seen, loss  # the last one is of the loop alone

    results = strategy.run(train, (iter(strategy.experimental_distribute_dataset(data)), tf.constant(4)))
    return [*(float(strategy.reduce("SUM", result)) for result in results), float(w.read_value())]


def _looped_alone() -> list[float]:
    w, seen, loss = 1.0, 0.0, 0.0
    for step in range(4):
        rows = [row / 32 for row in range(8 * step, 8 * step + 8)]
        loss = sum((w * x - 1) ** 2 for x in rows) / 8
        w -= (step % 2) * 0.1 * sum(2 * (w * x - 1) * x for x in rows) / 8
        seen += loss
    return [seen, loss, w]


def _left_alone(first: int) -> list[float]:
    """Values on the device stay each replica's own; values on the host are combined."""
    import tensorflow as tf

    from khorovod_ipu.tensorflow.strategies import PopDistStrategy

    with tf.Graph().as_default():
        strategy = PopDistStrategy(add_ipu_cross_replica_reductions=False)

        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            own = tf.identity(tf.cast(context.replica_id_in_sync_group, tf.float32))
            with tf.device("/device:CPU:0"):
                combined = context.all_reduce("SUM", tf.constant(1.0))
            return context.all_reduce("SUM", own), combined

        own, combined = strategy.run(replica)
        results = [strategy.experimental_local_results(value) for value in (own, combined)]
        with tf.compat.v1.Session() as session:
            own, combined = session.run(results)
    assert set(combined) == {float(strategy.num_replicas_in_sync)}
    return [float(value) - first for value in own]


def _program(instance: int) -> dict[str, Any]:
    """A script of TensorFlow 1: a loop of the device that reads an infeed queue, trains, and fills an outfeed queue."""
    import tensorflow as tf
    from tensorflow.python.ipu import ipu_compiler, ipu_infeed_queue, ipu_outfeed_queue, loops

    import popdist
    from khorovod_ipu.tensorflow.strategies import PopDistStrategy

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        strategy = PopDistStrategy()
        with strategy.scope():
            rows = (
                tf.data.Dataset.range(16)
                .map(lambda i: tf.cast(i, tf.float32))
                .shard(popdist.getNumInstances(), instance)
            )
            infeed = ipu_infeed_queue.IPUInfeedQueue(rows.repeat())
            outfeed = ipu_outfeed_queue.IPUOutfeedQueue()

            def step(total: Any, x: Any) -> Any:
                w = v1.get_variable("w", initializer=1.0)
                trained = v1.train.GradientDescentOptimizer(0.01).minimize(w * x)
                fed = outfeed.enqueue({"x": x})
                with tf.control_dependencies([trained]):
                    return total + x, fed

            def program() -> Any:
                return loops.repeat(2, step, [tf.constant(0.0)], infeed)

            total = strategy.experimental_run_v2(lambda: ipu_compiler.compile(program, []))
            seen = outfeed.dequeue()["x"]
            with v1.Session() as session:
                session.run([infeed.initializer, v1.global_variables_initializer()])
                return {
                    "total": session.run(total), "seen": session.run(seen).tolist(),
                    "w": float(session.run(v1.global_variables()[0])),
                }  # fmt: skip


def _estimated(folder: str) -> list[float]:
    """Twice two steps of an Estimator, with state on the host, and what is in worker 0's checkpoint after that."""
    import tensorflow as tf

    from khorovod_ipu.tensorflow.estimator import IPUEstimator, IPUEstimatorSpec, IPURunConfig, RunConfig
    from khorovod_ipu.tensorflow.strategies import PopDistStrategy

    v1, strategy = tf.compat.v1, PopDistStrategy()

    def data(params: dict[str, Any], input_context: Any) -> Any:
        rows = tf.data.Dataset.range(32).map(lambda i: tf.cast(i, tf.float32) / 32)
        part = rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return part.batch(params["batch_size"]).map(lambda x: (x, 3 * x)).repeat()

    def model(features: Any, labels: Any, mode: str, params: Any) -> Any:
        w = v1.get_variable("w", initializer=2.0 + strategy.extended._collectives.rank)
        on_read, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
        seen = v1.get_variable("seen", initializer=0.0, trainable=False, synchronization=on_read, aggregation=total)
        loss = v1.losses.mean_squared_error(labels, w * features)
        rate = v1.train.exponential_decay(0.5, v1.train.get_global_step(), 1, 0.5)
        optimizer = v1.train.MomentumOptimizer(rate, 0.9)
        ((gradient, _),) = optimizer.compute_gradients(loss)
        with tf.control_dependencies([seen.assign_add(1.0)]):
            step = tf.identity(loss)
        call = (lambda g: optimizer.apply_gradients([(g, w)]), [gradient])
        return IPUEstimatorSpec(mode, None, loss, step, host_call=call)

    more = {"train_distribute": strategy, "log_step_count_steps": None, "save_summary_steps": None}
    config = RunConfig(IPURunConfig(num_replicas=2), model_dir=folder, **more)
    with pytest.raises(NotImplementedError, match=r"this worker has 2 replicas, by its strategy\. Received: .*=3"):
        RunConfig(IPURunConfig(num_replicas=3), **more)
    for steps in (2, 4):
        estimator = IPUEstimator(model, config=config, train_batch_size=16)
        estimator.train(data, max_steps=steps)
    return [float(estimator.get_variable_value(name)) for name in ("w", "seen")] if config.is_chief else []


def _estimated_alone() -> float:
    """The same steps by hand; the data begins again where training does."""
    w, velocity = 2.0, 0.0
    for step, start in enumerate((0, 16, 0, 16)):
        rows = [row / 32 for row in range(start, start + 16)]
        velocity = 0.9 * velocity + sum(2 * (w - 3) * x * x for x in rows) / 16
        w -= 0.5 * 0.5**step * velocity
    return w


def _alone() -> tuple[list[float], float]:
    """The same steps by hand, on whole batches; every replica has every total-th row of a shard."""
    w, velocity, losses = 1.0, 0.0, []
    for start in (0, 16):
        rows = [row / 32 for row in range(start, start + 16)]
        losses.append(sum((w * x - 1) ** 2 for x in rows) / 16)
        velocity = 0.9 * velocity + sum(2 * (w * x - 1) * x for x in rows) / 16
        w -= 0.1 * velocity
    return losses, w


@pytest.mark.slow
@pytest.mark.parametrize(("size", "local"), [(1, 2), (2, 2), (2, 1)])
def test_replicas_train_as_one_on_the_whole_batch(size: int, local: int, tmp_path: Path) -> None:
    losses, w = _alone()
    total = size * local
    estimated: list[Any] = [None] * size
    if local > 1:
        estimated = [pytest.approx([_estimated_alone(), 4.0 * total], rel=1e-5), *([[]] * (size - 1))]
    for rank, found in enumerate(run_ranks(size, _numbers, local, str(tmp_path), framework="tensorflow")):
        assert found["estimated"] == estimated[rank]
        assert found["in sync"] == total
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["w"] == pytest.approx([w] * local, rel=1e-5)
        assert found["moving"] == pytest.approx(sum(range(16, 32)) / 16 / 32)
        assert found["squares"] == [sum(i * i for i in range(8)), sum(i * i for i in range(8, 16))]
        assert found["numbers"] == list(range(total))
        assert found["mean"] == (total - 1) / 2
        assert found["one"] == total
        assert found["looped"] == pytest.approx(_looped_alone(), rel=1e-5)
        assert found["alone"] == list(range(local))
        # Two steps, in each of which every replica takes the next row of its instance.
        rows = [[float(rank + size * (step * local + replica)) for replica in range(local)] for step in range(2)]
        assert found["program"]["seen"] == (rows if local > 1 else [row[0] for row in rows])
        assert found["program"]["total"] == [sum(row[0] for row in rows)]
        assert found["program"]["w"] == pytest.approx(1 - 0.01 * sum(range(2 * total)))
