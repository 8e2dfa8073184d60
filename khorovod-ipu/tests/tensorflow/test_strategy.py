"""The strategy over Horovod's engine: the SDK's own numbers, in graphs of TensorFlow 1 and with eager execution."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ranks, run_ranks


def _graph(on_host: bool) -> dict[str, Any]:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    v1 = tf.compat.v1
    found: dict[str, Any] = {}
    with tf.Graph().as_default():
        strategy = IPUHorovodStrategy(variables_on_host=on_host)
        rank, size = strategy.extended._collectives.rank, strategy.num_replicas_in_sync

        def replica(x: Any) -> Any:
            w = v1.get_variable("w", initializer=float(rank + 1))
            step = w.assign_sub(0.1 * size * tf.distribute.get_replica_context().all_reduce("MEAN", x))
            on_read, mean = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.MEAN
            moving = [
                tf.Variable(0.0, trainable=False, synchronization=on_read, aggregation=mean, name=name)
                for name in ("mean", "variance")
            ]
            seen = [moving[0].assign(x), moving[1].assign(x * x)]
            momentum = v1.train.MomentumOptimizer(0.5, 0.9)
            other = v1.get_variable("other", initializer=1.0)
            trained = momentum.minimize(other * x, var_list=[other])
            return x * x, w, step, moving, seen, momentum.get_slot(other, "momentum"), trained

        with strategy.scope():
            squared, w, step, moving, seen, slot, trained = strategy.run(replica, (tf.constant(rank + 1.0),))
            total = [strategy.reduce(how, squared) for how in ("SUM", "MEAN")]
            read = [strategy.extended.read_var(v) for v in moving]
            numbers = strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(2))
            numbers = v1.data.make_initializable_iterator(numbers)
            fours = strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.from_tensors(4 + rank))
            fours = v1.data.make_initializable_iterator(fours)
            fed = [
                strategy.reduce("SUM", strategy.experimental_run_v2(tf.reduce_sum, args=(each.get_next(),)))
                for each in (numbers, fours)
            ]
        found["devices"] = [w.device, slot.device, moving[0].device]
        config = strategy.update_config_proto(v1.ConfigProto(allow_soft_placement=False))
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            found["first"] = float(session.run(w))
            found["total"] = [float(value) for value in session.run(total)]
            for _ in range(10):
                session.run([step, trained])
            found["w"] = float(session.run(w))
            session.run(seen)
            found["read"] = [float(value) for value in session.run(read)]
            session.run([numbers.initializer, fours.initializer])
            found["fed"] = [int(value) for value in session.run(fed)]
    return found


@pytest.mark.parametrize("on_host", [False, True])
def test_the_numbers_of_the_sdks_tests_in_a_graph(on_host: bool) -> None:
    for found in run_ranks(2, _graph, on_host, framework="tensorflow"):
        device = "/device:CPU:0" if on_host else "/device:IPU:0"
        assert found["devices"] == [device, device, "/device:IPU:0"]
        assert found["first"] == 1.0
        assert found["total"] == [5.0, 2.5]
        assert found["w"] == pytest.approx(1.0 - 10 * 0.1 * 2 * 1.5, abs=1e-5)
        assert found["read"] == [1.5, 2.5]
        assert found["fed"] == [1, 9]


def _eager() -> dict[str, Any]:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    strategy = IPUHorovodStrategy()
    rank = strategy.extended._collectives.rank
    found: dict[str, Any] = {}
    with strategy.scope():
        w = tf.Variable(float(rank + 1))
    found["first"] = w.numpy()

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(lambda x: tf.reduce_sum(x * x), (batch,)))

    numbers = strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(2))
    found["squares"] = [int(step(batch)) for batch in numbers]

    def shard(context: Any) -> Any:
        found["context"] = (
            context.num_input_pipelines, context.input_pipeline_id, context.get_per_replica_batch_size(4)
        )  # fmt: skip
        return tf.data.Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id).batch(3)

    (part,) = strategy.distribute_datasets_from_function(shard)
    found["part"] = strategy.experimental_local_results(part)[0].numpy().tolist()
    found["rows"] = strategy.gather(tf.fill([rank + 1, 2], rank), 0).numpy().tolist()
    found["columns"] = strategy.gather(tf.fill([1, rank + 1], rank), -1).numpy().tolist()
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([2, 2]))
    found["slices"] = tf.convert_to_tensor(strategy.reduce("SUM", slices)).numpy().tolist()
    found["number"] = int(strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group))
    found["one"] = float(tf.function(lambda: strategy.run(_summed))())
    with strategy.scope():
        count = tf.Variable(
            0, aggregation=tf.VariableAggregation.SUM, synchronization=tf.VariableSynchronization.ON_READ
        )
    strategy.run(lambda: count.assign_add(rank + 1))
    found["count"] = int(count.numpy())
    with pytest.raises(ValueError, match="device of this worker"):
        IPUHorovodStrategy("/job:worker/device:IPU:0")
    return found


def _summed() -> Any:
    import tensorflow as tf

    return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))


@pytest.mark.parametrize("hosts", [(), (1, 1)], ids=["one host", "two hosts"])
def test_the_numbers_of_the_sdks_tests_eagerly(hosts: tuple[int, ...]) -> None:
    for rank, found in enumerate(run_ranks(2, _eager, framework="tensorflow", hosts=hosts)):
        assert found["first"] == 1.0
        assert found["squares"] == [1, 13, 41, 85, 145]
        assert found["context"] == (2, rank, 2)
        assert found["part"] == [rank, rank + 2, rank + 4]
        assert found["rows"] == [[0, 0], [1, 1], [1, 1]]
        assert found["columns"] == [[0, 1, 1]]
        assert found["slices"] == [[1, 1], [1, 1]]
        assert found["number"] == rank
        assert found["one"] == 2.0
        assert found["count"] == 3


def _killed() -> str:
    import os
    import signal

    import tensorflow as tf

    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    with tf.Graph().as_default():
        strategy = IPUHorovodStrategy()
        with strategy.scope():
            total = strategy.reduce("SUM", tf.constant(1.0))
        with tf.compat.v1.Session() as session:
            assert session.run(total) == 2.0
            if strategy.extended._collectives.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(tf.errors.UnknownError) as caught:
                session.run(total)
    return str(caught.value.message)


def test_a_rank_that_dies_is_named_in_the_error_of_a_session() -> None:
    outcomes = Ranks(2, _killed, framework="tensorflow").outcomes()
    assert outcomes[0].exitcode == 0, outcomes[0].text
    assert "PeerLostError: rank 1" in outcomes[0].value


def _one_device() -> Any:
    import keras
    import numpy as np
    import tensorflow as tf
    from tensorflow.python import ipu

    options = ipu.utils.set_matmul_options(ipu.utils.create_ipu_config(), clear_pass_type=True)
    options = ipu.utils.set_experimental_multi_replica_distribution_options(options, 2, 1)
    ipu.utils.configure_ipu_system(ipu.utils.auto_select_ipus(options, 1))
    assert options.compilation_options.matmul_options.clear_pass_type
    assert options.experimental.multi_replica_distribution.process_index == 1
    with pytest.raises(AttributeError, match="has no 'embedding_ops' on the software device"):
        _ = ipu.embedding_ops
    with pytest.raises(AttributeError, match="utils has no 'get_ipu_config' on the software device"):
        _ = ipu.utils.get_ipu_config
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24

    def fitted(scope: Any) -> list[float]:
        with scope:
            model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        rows = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).batch(4, drop_remainder=True)
        losses: list[float] = model.fit(rows, epochs=2, verbose=0).history["loss"]
        return losses

    strategy = ipu.ipu_strategy.IPUStrategy()
    double = strategy.run(tf.function(lambda number: number * 2), args=(tf.constant(21.0),))
    return [float(double), fitted(strategy.scope()), fitted(tf.device("/cpu:0"))]


@pytest.mark.slow
def test_one_device_trains_as_none_does() -> None:
    [[double, over_strategy, plain]] = run_ranks(1, _one_device, framework="tensorflow")
    assert double == 42
    assert over_strategy == pytest.approx(plain, rel=1e-6)
