"""Estimators over Horovod's engine: the SDK's numbers, checkpoints, resuming, and what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import run_ranks


def _points(x: float, y: float) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensors((np.float32([x]), np.float32([y]))).repeat()


def _config(folder: str, strategy: Any = None, **more: Any) -> Any:
    from khorovod_ipu.tensorflow.estimator import RunConfig

    return RunConfig(model_dir=folder, train_distribute=strategy, log_step_count_steps=None, **more)


def _host_model(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.estimator import IPUEstimatorSpec

    v1 = tf.compat.v1
    w = v1.get_variable("w", initializer=2.0)
    seen = tf.Variable(
        0.0, trainable=False, synchronization=tf.VariableSynchronization.ON_READ, name="seen",
        aggregation=tf.VariableAggregation.SUM,
    )  # fmt: skip
    if mode == "infer":
        return IPUEstimatorSpec(mode, {"y": w * features})
    if params.get("summed"):
        loss = v1.losses.mean_squared_error(labels, w * features, reduction=v1.losses.Reduction.SUM)
    else:
        loss = v1.losses.mean_squared_error(labels, w * features)
    if mode == "eval":
        return IPUEstimatorSpec(mode, None, loss, eval_metrics=(lambda e: {"error": v1.metrics.mean(e)}, [loss]))
    optimizer = v1.train.MomentumOptimizer(0.5, 0.0)
    ((gradient, _),) = optimizer.compute_gradients(loss, [w])
    with tf.control_dependencies([seen.assign_add(1.0)]):
        step = tf.identity(loss)
    return IPUEstimatorSpec(
        mode, None, loss, step, host_call=(lambda g: optimizer.apply_gradients([(g, w)]), [gradient])
    )  # fmt: skip


def _trained(folder: str) -> dict[str, Any]:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.estimator import IPUEstimator, IPURunConfig
    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    strategy = IPUHorovodStrategy(variables_on_host=True)
    rank = strategy.extended._collectives.rank
    contexts: list[Any] = []

    def data(mode: str, input_context: Any = None) -> Any:
        if input_context is not None:
            contexts.append((input_context.num_input_pipelines, input_context.input_pipeline_id))
        return _points(rank + 1.0, rank + 1.0).take(4) if mode != "train" else _points(rank + 1.0, rank + 1.0)

    mine = f"{folder}/{rank}"  # worker 0's counts
    estimator = IPUEstimator(_host_model, config=_config(mine, strategy), params={})
    estimator.train(data, steps=1)
    found: dict[str, Any] = {"contexts": contexts, "files": Path(mine).exists()}
    if rank == 0:
        found["after 1"] = estimator.get_variable_value("w")
    again = IPUEstimator(_host_model, config=_config(mine, strategy), params={})
    again.train(data, max_steps=3)
    again.train(data, max_steps=3)
    summed = IPUEstimator(_host_model, config=_config(f"{mine}-summed", strategy), params={"summed": True})
    summed.train(data, steps=1)
    looped = IPUEstimator(
        _host_model, config=_config(f"{mine}-looped", strategy, ipu_run_config=IPURunConfig(3)), params={}
    )
    looped.train(data, steps=3)
    if rank == 0:
        found["looped"] = looped.get_variable_value("w")
        found["after 3"] = again.get_variable_value("w")
        found["names"] = again.get_variable_names()
        found["seen"] = float(again.get_variable_value("seen"))
        found["evaluated"] = again.evaluate(data)
        found["predicted"] = [float(value["y"]) for value in again.predict(data)]
        found["summed"] = summed.get_variable_value("w")
        found["exported"] = _exported(again, f"{folder}/exported")
        found["summaries"] = bool(list(Path(mine).glob("events*")))
        with tf.Graph().as_default():
            found["plain"] = sorted(name for name, _ in tf.train.list_variables(mine))
    return found


def _exported(estimator: Any, folder: str) -> list[Any]:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.estimator import export

    def receive() -> Any:
        fed = tf.compat.v1.placeholder(tf.float32, [None, 1], name="x")
        return export.ServingInputReceiver(fed, fed)

    written = estimator.export_saved_model(folder, receive)
    loaded = tf.saved_model.load(written.decode())
    served = loaded.signatures["serving_default"](input=tf.constant([[1.0], [2.0]]))
    return [written != estimator.export_saved_model(folder, receive), *served["y"].numpy().ravel().tolist()]


def _expected(steps: int, scale: float = 0.5) -> np.float32:
    w = np.float32(2)
    for _ in range(steps):
        w -= np.float32(scale) * np.float32(sum((w * x - x) * x for x in (np.float32(1), np.float32(2))))
    return w


def test_host_call_makes_the_sdks_steps_to_the_bit_and_resumes(tmp_path: Path) -> None:
    first, second = run_ranks(2, _trained, str(tmp_path), framework="tensorflow")
    assert first["after 1"] == _expected(1) and first["after 3"] == first["looped"] == _expected(3)
    assert first["summed"] == _expected(1, scale=1.0)  # a loss that is a sum is not divided by the workers
    assert set(first["contexts"]) == {(2, 0)} and set(second["contexts"]) == {(2, 1)}
    assert first["files"] and first["summaries"] and not second["files"]
    assert first["seen"] == 3 * 2  # three steps of two workers, over a resumption
    assert first["evaluated"]["global_step"] == 3
    assert first["evaluated"]["error"] == pytest.approx((first["after 3"] - 1) ** 2)
    assert first["predicted"] == [first["after 3"]] * 4
    assert first["exported"] == [True, first["after 3"], 2 * first["after 3"]]
    assert {"w", "global_step", "seen"} <= set(first["plain"])


def _overlapped(folder: str) -> list[str]:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.estimator import IPUEstimator, IPUEstimatorSpec
    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    v1 = tf.compat.v1
    is_applied = threading.Event()
    order: list[str] = []

    def note(what: str, value: Any) -> Any:
        if what == "first layer's gradient":
            assert is_applied.wait(300), "the last layer's step waits for the whole of backward"
        order.append(what)
        if what == "last layer's step":
            is_applied.set()
        return value

    def noted(what: str, tensor: Any) -> Any:
        result = tf.numpy_function(lambda value: note(what, value), [tensor], tensor.dtype)
        result.set_shape(tensor.shape)
        return result

    def model(features: Any, labels: Any, mode: str) -> Any:
        a, b = (v1.get_variable(name, initializer=1.0) for name in "ab")
        optimizer = v1.train.GradientDescentOptimizer(0.1)

        @tf.custom_gradient
        def slow(value: Any) -> Any:
            return tf.identity(value), lambda grad: noted("first layer's gradient", grad)

        loss = tf.reduce_sum(b * slow(a * features))
        pairs = optimizer.compute_gradients(loss, [a, b])

        def on_host(*gradients: Any) -> Any:
            with tf.control_dependencies([optimizer.apply_gradients([(gradients[1], b)])]):
                last = noted("last layer's step", tf.constant(0.0))
            return tf.group(last, optimizer.apply_gradients([(gradients[0], a)]))

        return IPUEstimatorSpec(mode, None, loss, tf.identity(loss), host_call=(on_host, [g for g, _ in pairs]))

    strategy = IPUHorovodStrategy(variables_on_host=True)
    config = _config(folder, strategy, save_checkpoints_secs=0, save_summary_steps=None)
    IPUEstimator(model, config=config).train(lambda: _points(1.0, 1.0), steps=1)
    return order


def test_host_call_applies_the_last_layer_while_the_device_computes_the_first(tmp_path: Path) -> None:
    found = run_ranks(2, _overlapped, str(tmp_path), framework="tensorflow")
    assert found == [["last layer's step", "first layer's gradient"]] * 2


def _refusals(folder: str) -> None:
    import tensorflow as tf

    from khorovod_ipu.tensorflow import estimator as estimators
    from khorovod_ipu.tensorflow.estimator import (
        EstimatorSpec,
        EvalSpec,
        IPUEstimator,
        IPUEstimatorSpec,
        IPURunConfig,
        RunConfig,
        TrainSpec,
        export,
        train_and_evaluate,
    )
    from khorovod_ipu.tensorflow.strategies import IPUHorovodStrategy

    v1 = tf.compat.v1
    one = tf.constant(1.0)
    for call, kind, text in (
        ([len, [one]], TypeError, "must be a tuple"),
        ((len,), ValueError, "Received: 1 items"),
        ((1, [one]), TypeError, "must be a function"),
        ((len, one), TypeError, "must be a list of tensors"),
        ((len, [None]), TypeError, "gradient is None"),
    ):
        with pytest.raises(kind, match=text):
            IPUEstimatorSpec("train", None, one, one, host_call=call)
    with pytest.raises(ValueError, match="training only"):
        IPUEstimatorSpec("eval", None, one, host_call=(len, [one]))
    with pytest.raises(ValueError, match="must return a loss"):
        IPUEstimatorSpec("train", train_op=one)
    with pytest.raises(ValueError, match="num_shards must be a positive number"):
        IPURunConfig(num_shards=0)

    def model(features: Any, labels: Any, mode: str, params: Any) -> Any:
        w = v1.get_variable("w", initializer=2.0)
        if mode == "infer":
            return IPUEstimatorSpec(mode, w * features)
        loss = v1.losses.mean_squared_error(labels, w * features)
        if mode == "eval":
            return IPUEstimatorSpec(mode, None, loss, eval_metric_ops={"w": v1.metrics.mean(w)})
        step = v1.train.get_global_step() if params.get("counts") else None
        operation = v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        call = (lambda g: None, [loss]) if params.get("calls") else None
        if "chief" in params:
            scaffold = v1.train.Scaffold(init_fn=lambda _, session: session.run(w.initializer, {w.initial_value: 7.0}))
            return EstimatorSpec(
                mode, None, loss, operation, training_chief_hooks=[params["chief"]], scaffold=scaffold
            )  # fmt: skip
        return IPUEstimatorSpec(mode, None, loss, operation, host_call=call)

    def data(params: Any) -> Any:
        return _points(1.0, params.get("batch_size", 1.0))

    def trained(wanted: Any, params: dict[str, Any], loop: int = 1, model_dir: str = folder, **more: Any) -> Any:
        device = IPURunConfig(loop, num_shards=2)
        config = RunConfig(device, model_dir=model_dir, save_summary_steps=None, log_step_count_steps=None)
        return IPUEstimator(model, config=config, params=params, **more).train(wanted, steps=loop)

    with pytest.raises(ValueError, match="changes global_step"):
        trained(data, {"counts": True})
    with pytest.raises(TypeError, match="must return the operation that makes the step"):
        trained(data, {"calls": True})
    with pytest.raises(ValueError, match="input_fn must take params"):
        trained(lambda: _points(1.0, 1.0), {}, train_batch_size=4)
    with pytest.raises(ValueError, match=r"must return a tf\.data\.Dataset. Received: int"):
        trained(lambda: 1, {})
    with pytest.raises(ValueError, match="cannot be divided evenly"):
        IPUEstimator(model, config=RunConfig(train_distribute=IPUHorovodStrategy()), train_batch_size=-1)
    with pytest.raises(ValueError, match="takes a scaffold without a saver"):
        EstimatorSpec("train", None, one, one, scaffold=v1.train.Scaffold(saver=object()))
    begun: list[float] = []

    class Look(v1.train.SessionRunHook):
        def begin(self) -> None:
            self.w = v1.global_variables("w")[0].read_value()

        def after_create_session(self, session: Any, coord: Any) -> None:
            begun.append(float(session.run(self.w)))

    trained(data, {"chief": Look()}, model_dir=f"{folder}/scaffolded")
    assert begun == [7.0]
    estimator = trained(data, {}, 4, train_batch_size=2)
    w = 2.0
    for _ in range(4):
        w -= 0.1 * 2 * (w - 2.0)
    assert float(estimator.get_variable_value("w")) == pytest.approx(w)
    with pytest.raises(ValueError, match="positive multiple of iterations_per_loop=4"):
        estimator.train(data, steps=3)

    def receive() -> Any:
        return export.ServingInputReceiver(v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None]))

    for end in (8, 12):
        metrics, exports = train_and_evaluate(
            estimator, TrainSpec(data, max_steps=end), EvalSpec(data, steps=2, throttle_secs=0)
        )
        assert metrics["global_step"] == end and exports == []
    path = estimator.export_saved_model(str(Path(folder) / "export"), receive)
    assert (Path(path.decode()) / "saved_model.pb").exists()
    with pytest.raises(ValueError, match="exporters are not imitated"):
        train_and_evaluate(estimator, TrainSpec(data), EvalSpec(data, exporters=[object()]))
    with pytest.raises(AttributeError, match="BestExporter is not imitated"):
        estimators.BestExporter


def _refusals_after_disable_v2_behavior(folder: str) -> None:
    import tensorflow as tf

    tf.compat.v1.disable_resource_variables()  # one of the things it does, and one that can be taken back
    try:
        _refusals(folder)
    finally:
        tf.compat.v1.enable_resource_variables()


def test_what_cannot_be_meant_is_refused_and_loops_count_their_steps(tmp_path: Path) -> None:
    run_ranks(1, _refusals_after_disable_v2_behavior, str(tmp_path), framework="tensorflow")


def _receivers() -> None:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.estimator import export

    raw = export.build_raw_serving_input_receiver_fn({"x": tf.zeros([3, 2])})
    parsing = export.build_parsing_serving_input_receiver_fn({"x": tf.io.FixedLenFeature([1], tf.float32)})
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=[1.5]))
    example = tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fed = raw()
        assert fed.receiver_tensors["x"] is fed.features["x"] and fed.features["x"].shape.as_list() == [None, 2]
        parsed = parsing()
        assert (
            session.run(parsed.features["x"], {parsed.receiver_tensors["examples"]: [example] * 2}).tolist()
            == [[1.5]] * 2
        )


def test_receivers_of_plain_and_of_serialized_features() -> None:
    run_ranks(1, _receivers, framework="tensorflow")
