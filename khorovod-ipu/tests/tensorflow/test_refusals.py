"""Settings of estimators and of ``ipu`` that change results have an effect, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks


def _of_estimators(folder: str) -> None:
    import tensorflow as tf

    from khorovod_ipu.tensorflow.estimator import EstimatorSpec, IPUEstimator, RunConfig, export

    v1 = tf.compat.v1
    one = tf.constant(1.0)
    hook, scaffold = v1.train.StepCounterHook(), v1.train.Scaffold()
    spec = EstimatorSpec("train", None, one, one, training_chief_hooks=[hook], scaffold=scaffold)
    changed = spec._replace(loss=tf.constant(2.0))
    assert (changed.training_chief_hooks, changed.scaffold) == ((hook,), scaffold)
    with pytest.raises(NotImplementedError, match="experimental_distribute is not imitated"):
        RunConfig(experimental_distribute=object())

    def model(features: Any, labels: Any, mode: str) -> Any:
        w = v1.get_variable("w", initializer=2.0)
        if mode == "infer":
            return EstimatorSpec(mode, w * features)
        loss = tf.reduce_mean((w * features - labels) ** 2)
        return EstimatorSpec(mode, None, loss, v1.train.GradientDescentOptimizer(0.1).minimize(loss))

    def data() -> Any:
        return tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(2)

    config = RunConfig(model_dir=folder, save_summary_steps=None, log_step_count_steps=None)
    assert (config.save_checkpoints_secs, RunConfig(save_checkpoints_steps=5).save_checkpoints_secs) == (600, None)
    none = config.replace(save_checkpoints_steps=None, save_checkpoints_secs=None)
    IPUEstimator(model, config=none).train(data)
    assert not list(Path(folder).iterdir())
    with pytest.raises(ValueError, match="saving_listeners need checkpoints"):
        IPUEstimator(model, config=none).train(data, saving_listeners=[v1.train.CheckpointSaverListener()])
    estimator = IPUEstimator(model, config=config).train(data)

    def receive() -> Any:
        x = v1.placeholder(tf.float32, [None])
        return export.ServingInputReceiver(x, x, {"other": x})

    with pytest.raises(NotImplementedError, match="receiver_tensors_alternatives are not imitated"):
        estimator.export_saved_model(f"{folder}/export", receive)


def _of_ipu() -> None:
    import tensorflow as tf
    from tensorflow.python import ipu

    config, name = ipu.config.IPUConfig(), "distributed_batch_norm_replica_group_size"
    setattr(config.norms.experimental, name, 2)
    with pytest.raises(NotImplementedError, match=f"{name}=2"):
        ipu.ipu_run_config.IPURunConfig(ipu_options=config)
    older = ipu.utils.create_ipu_config()
    ipu.utils.set_norm_options(older, **{f"experimental_{name}": 2})
    with pytest.raises(NotImplementedError, match=f"{name}=2"):
        ipu.utils.configure_ipu_system(older)
    ipu.utils.reset_ipu_seed(1, experimental_identical_replicas=False)
    with pytest.raises(NotImplementedError, match="experimental_identical_replicas=True"):
        ipu.utils.reset_ipu_seed(1, experimental_identical_replicas=True)
    modes = tf.distribute.InputReplicationMode
    with tf.Graph().as_default():
        strategy = ipu.ipu_strategy.IPUStrategy()
        for mode in (None, modes.PER_WORKER):
            strategy.make_input_fn_iterator(lambda context: tf.data.Dataset.range(4), mode)
        with pytest.raises(ValueError, match="PER_REPLICA is not imitated"):
            strategy.make_input_fn_iterator(lambda context: tf.data.Dataset.range(4), modes.PER_REPLICA)


def test_settings_of_estimators_have_an_effect_or_are_refused(tmp_path: Path) -> None:
    run_ranks(1, _of_estimators, str(tmp_path), framework="tensorflow")


def test_settings_of_ipu_that_would_change_results_are_refused() -> None:
    run_ranks(1, _of_ipu, framework="tensorflow")
