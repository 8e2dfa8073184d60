"""Workers over gRPC, as in terminals of their own: the numbers, and a worker that is lost or never comes."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks, run_ranks


def _addresses(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _strategy(addresses: list[str], **more: Any) -> Any:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.strategies import IPUMultiWorkerStrategy

    task = {"type": "worker", "index": int(os.environ["HOROVOD_RANK"])}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    return IPUMultiWorkerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver(), **more)


def _session(strategy: Any) -> Any:
    import tensorflow as tf

    v1 = tf.compat.v1
    config = strategy.update_config_proto(v1.ConfigProto(allow_soft_placement=False))
    jobs, rank = strategy.cluster_resolver.cluster_spec(), strategy.extended._collectives.rank
    server = tf.distribute.Server(jobs, job_name="worker", task_index=rank, config=config)
    return v1.Session(server.target, config=config)


def _numbers(addresses: list[str], folder: str) -> dict[str, Any]:
    import numpy as np
    import tensorflow as tf

    from khorovod_ipu.tensorflow.estimator import IPUEstimator, IPUEstimatorSpec, RunConfig

    v1 = tf.compat.v1
    found: dict[str, Any] = {}
    strategy = _strategy(addresses, variables_on_host=True)
    rank = strategy.extended._collectives.rank
    with strategy.scope():
        w = tf.Variable(float(rank + 1))
    found["first"] = w.numpy()
    # As scripts of TensorFlow 1 do, to whom nobody said that they run with eager execution.
    server = tf.distribute.Server(strategy.cluster_resolver.cluster_spec(), job_name="worker", task_index=rank)
    server.start()
    with tf.Graph().as_default(), strategy.scope():
        ranks = strategy.reduce("SUM", tf.constant(rank))
        with v1.Session(server.target, config=strategy.update_config_proto(v1.ConfigProto())) as session:
            found["ranks"] = int(session.run(ranks))
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(2))
    step = tf.function(lambda x: strategy.reduce("SUM", strategy.run(lambda x: tf.reduce_sum(x * x), (x,))))
    found["squares"] = [int(step(batch)) for batch in data]
    found["rows"] = strategy.gather(tf.fill([rank + 1], rank), 0).numpy().tolist()
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([2, 2]))
    found["slices"] = tf.convert_to_tensor(strategy.reduce("MEAN", slices)).numpy().tolist()

    def points(input_context: Any) -> Any:
        x = np.float32([input_context.input_pipeline_id + 1])
        return tf.data.Dataset.from_tensors((x, x)).repeat()

    def model(features: Any, labels: Any, mode: str) -> Any:
        w = v1.get_variable("w", initializer=2.0)
        loss = v1.losses.mean_squared_error(labels, w * features)
        optimizer = v1.train.GradientDescentOptimizer(0.5)
        ((gradient, _),) = optimizer.compute_gradients(loss, [w])
        call = (lambda g: optimizer.apply_gradients([(g, w)]), [gradient])
        return IPUEstimatorSpec(mode, None, loss, tf.identity(loss), host_call=call)

    config = RunConfig(model_dir=f"{folder}/{rank}", train_distribute=strategy, log_step_count_steps=None)
    estimator = IPUEstimator(model, config=config)
    estimator.train(points, steps=2)
    if rank == 0:
        found["w"] = float(estimator.get_variable_value("w"))
    # Nobody's server may go while another worker's last step needs it.
    step(tf.constant(1, tf.int64))
    return found


@pytest.mark.slow
def test_the_numbers_over_grpc_eagerly_and_in_an_estimator(tmp_path: Path) -> None:
    ranks = Ranks(2, _numbers, (_addresses(2), str(tmp_path)), init=False, framework="tensorflow")
    outcomes = ranks.outcomes()
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], [outcome.text for outcome in outcomes]
    w = 2.0
    for _ in range(2):
        w -= 0.5 * sum((w * x - x) * x for x in (1.0, 2.0))
    for outcome in outcomes:
        found = outcome.value
        assert found["first"] == 1.0 and found["ranks"] == 1
        assert found["squares"] == [1, 13, 41]
        assert found["rows"] == [0, 1, 1]
        assert found["slices"] == [[0.5, 0.5], [0.5, 0.5]]
    assert outcomes[0].value["w"] == w


def _fitted(addresses: list[str]) -> list[Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    strategy, steps = _strategy(addresses), []

    class Steps(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(logs["loss"])

    x = np.float32([[1], [2], [3], [4]])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((x, 0 * x)).batch(4), epochs=2, verbose=0, callbacks=[Steps()])
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=2)
    with pytest.raises(ValueError, match="steps_per_execution=2: Keras 3 cannot run several steps at once over gRPC"):
        model.fit(x, 0 * x, batch_size=4, verbose=0)
    return steps


@pytest.mark.slow
def test_keras_reports_the_loss_of_all_workers_and_refuses_several_steps_at_once() -> None:
    outcomes = Ranks(2, _fitted, (_addresses(2),), init=False, framework="keras-tensorflow").outcomes()
    for outcome in outcomes:
        assert outcome.exitcode == 0, outcome.text
        assert outcome.value == pytest.approx([7.5, 7.5 * (1 - 0.01 * 2 * 7.5) ** 2])


def _killed(addresses: list[str]) -> tuple[float, str]:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        strategy = _strategy(addresses)
        rank = strategy.extended._collectives.rank

        def step() -> Any:
            w = v1.get_variable("w", initializer=float(rank + 1))
            return w, v1.train.MomentumOptimizer(0.5, 0.5).minimize(w * (rank + 1.0))

        with strategy.scope():
            w, trained = strategy.experimental_run_v2(step)
            total = strategy.reduce("SUM", tf.constant(1.0))
        with _session(strategy) as session:
            assert session.run(total) == len(addresses)
            session.run(v1.global_variables_initializer())
            for _ in range(2):
                session.run(trained)
            learned = float(session.run(w))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(tf.errors.UnavailableError) as caught:
                session.run(total)
    return learned, str(caught.value.message)


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_and_a_worker_that_dies_in_it_is_named_on_all_others() -> None:
    addresses = _addresses(3)
    outcomes = Ranks(3, _killed, (addresses,), init=False, framework="tensorflow").outcomes()
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].exitcode == 0, outcomes[rank].text
        learned, message = outcomes[rank].value
        # Begun with worker 0's value; gradients of 1, 2 and 3 are added up.
        assert learned == 1 - 0.5 * 6 - 0.5 * (0.5 * 6 + 6)
        assert message.startswith(f"/job:worker/task:1 at {addresses[1]} was lost")


def _alone(addresses: list[str]) -> tuple[str, str]:
    import tensorflow as tf

    os.environ["HOROVOD_START_TIMEOUT"] = "1"
    with tf.Graph().as_default():
        strategy = _strategy(addresses)
        with strategy.scope():
            total = strategy.reduce("SUM", tf.constant(1.0))
        with _session(strategy) as session, pytest.raises(tf.errors.UnavailableError) as missing:
            session.run(total)
        # The error where a worker has come, but not to the operation that the others wait in.
        assert "All 2 workers are there, but one has not come" in strategy.extended._collectives.out_of_step()
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        child = os.fork()
        if child == 0:
            signal.pause()
        other.close()  # the child has it
        try:
            with tf.Graph().as_default(), pytest.raises(ValueError) as used:
                _strategy([taken, addresses[1]])
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return str(missing.value.message), str(used.value)


@pytest.mark.slow
def test_a_worker_that_never_comes_and_a_port_in_use_are_named() -> None:
    (outcome,) = Ranks(1, _alone, (_addresses(2),), init=False, framework="tensorflow").outcomes()
    assert outcome.exitcode == 0, outcome.text
    missing, used = outcome.value
    assert "waited 1 s for /job:worker/task:1 at 127.0.0.1:" in missing
    assert "which is this worker, is in use by another process" in used


def _twice(addresses: list[str]) -> None:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.cluster import ClusterError

    with tf.Graph().as_default():
        for index in ("0", "0", "1"):
            os.environ["HOROVOD_RANK"] = index
            if index == "1":
                with pytest.raises(
                    ClusterError, match=r"this process is /job:worker/task:0 at .* already\. Received: .*:1 at"
                ):
                    _strategy(addresses)
            else:
                _strategy(addresses)


def test_two_workers_in_one_process_are_refused() -> None:
    run_ranks(1, _twice, _addresses(2), framework="tensorflow")
