"""One call of ``train()``: the graph, the session, the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

from khorovod_ipu.tensorflow import servers
from khorovod_ipu.tensorflow.estimator.checkpoints import CheckpointHook, TrainingState, parts
from khorovod_ipu.tensorflow.estimator.inputs import next_batches
from khorovod_ipu.tensorflow.estimator.model import call_model, new_graph, step_on_host
from khorovod_ipu.tensorflow.estimator.spec import IPUEstimatorSpec, ModeKeys
from khorovod_ipu.tensorflow.replicas import own_context
from khorovod_ipu.tensorflow.ring import RingCollectives

__all__ = ["StopAtStep", "train"]

v1 = tf.compat.v1
_HOST = "/device:CPU:0"


class StopAtStep(tf.compat.v1.train.SessionRunHook):
    """Ends training at a step, simultaneously on all workers; also if the step was reached before.

    Args:
        steps: number of steps of this call, or None.
        max_steps: number of steps of all calls together, or None.
    """

    def __init__(self, steps: int | None, max_steps: int | None) -> None:
        self._steps = steps
        self.last_step = max_steps

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Read the step at which training begins."""
        begun = int(session.run(v1.train.get_global_step()))
        if self._steps is not None:
            self.last_step = begun + self._steps
        self.is_done = self.last_step is not None and begun >= self.last_step

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """End training when the step is reached."""
        if self.last_step is None:
            return
        if int(run_context.session.run(v1.train.get_global_step())) >= self.last_step:
            run_context.request_stop()


@contextlib.contextmanager
def _strategy_scope(strategy: Any) -> Iterator[None]:
    if strategy is None:
        yield
        return
    strategy.extended._is_begun_later = True
    try:
        with strategy.scope(), strategy._scale_loss_for_estimator_enabled():
            yield
    finally:
        strategy.extended._is_begun_later = False


def train(
    estimator: Any, input_fn: Callable[..., Any], hooks: Sequence[Any], stop: StopAtStep, listeners: Sequence[Any]
) -> None:
    """Train until ``stop`` ends it; takes the arguments of ``IPUEstimator.train``."""
    config, strategy = estimator.config, estimator.config.train_distribute
    session_config, target = _session_of(strategy, config)
    with new_graph(), _strategy_scope(strategy):
        if config.tf_random_seed is not None:
            v1.set_random_seed(config.tf_random_seed)
        v1.train.create_global_step()
        spec, train_op, loss = _built(estimator, input_fn, strategy)
        v1.summary.scalar("loss", loss)
        state = TrainingState(strategy, config.keep_checkpoint_max, config.keep_checkpoint_every_n_hours)
        all_hooks = [
            stop,
            *_own_hooks(estimator, state, loss, listeners),
            *spec.training_hooks,
            *(spec.training_chief_hooks if config.is_chief else ()),
            *hooks,
        ]
        scaffold = _scaffold(spec.scaffold, state, estimator.model_dir if config.is_chief else None)
        # Use a session that does not restart after a lost worker: the other workers have continued.
        with v1.train.SingularMonitoredSession(all_hooks, scaffold, target, session_config) as session:
            while not session.should_stop() and not stop.is_done:
                _run_loop(session, train_op, config.device.iterations_per_loop)


def _scaffold(given: Any, state: TrainingState, model_dir: str | None) -> Any:
    """Return the model function's scaffold, extended to copy worker 0's values to all workers."""

    def start(_: Any, session: Any) -> None:
        if given is not None and given.init_fn is not None:
            given.init_fn(session)
        state.start(session, model_dir)

    names = (
        "init_op", "init_feed_dict", "ready_op", "ready_for_local_init_op", "local_init_op", "local_init_feed_dict",
    )  # fmt: skip
    wanted = {name: getattr(given, name) for name in names} if given is not None else {}
    summaries = given.summary_op if given is not None and given.summary_op is not None else v1.summary.merge_all()
    return v1.train.Scaffold(init_fn=start, saver=state.saver, summary_op=summaries, **wanted)


def _session_of(strategy: Any, config: Any) -> tuple[Any, str]:
    """Return configuration and target of a session; over gRPC, start this worker's server and wait for all workers."""
    session_config = config.session_config or v1.ConfigProto()
    if strategy is None:
        return session_config, config.master or ""
    session_config = strategy.update_config_proto(session_config)
    collectives = strategy.extended._collectives
    if not isinstance(collectives, RingCollectives):
        return session_config, config.master or ""
    target = servers.target_of(collectives.cluster, session_config)
    collectives.wait_for_workers()
    return session_config, target


def _run_loop(session: Any, train_op: Any, iterations: int) -> None:
    """Run all steps of a loop; hooks see only the last one."""

    def steps(step_context: Any) -> None:
        for _ in range(iterations - 1):
            step_context.session.run(train_op)
        step_context.run_with_hooks(train_op)

    if iterations == 1:
        session.run(train_op)
    else:
        session.run_step_fn(steps)


def _built(estimator: Any, input_fn: Callable[..., Any], strategy: Any) -> tuple[IPUEstimatorSpec, Any, Any]:
    """Build the graph of one step; return the spec, the operation, and the loss to show."""
    config = estimator.config
    context = strategy.extended._make_input_context() if strategy is not None else None
    params = estimator.params_for(ModeKeys.TRAIN)
    replicas = 1 if strategy is None else len(strategy.extended.worker_devices)
    depth = config.device.prefetch_depth
    batches = next_batches(input_fn, ModeKeys.TRAIN, params, config, context, depth, replicas)
    host = strategy.extended._host_device if strategy is not None else _HOST
    specs: dict[int, IPUEstimatorSpec] = {}
    steps: dict[int, Any] = {}

    def model() -> None:
        number = 0 if replicas == 1 else own_context().local
        features, labels = batches[number]
        spec = specs[number] = call_model(estimator.model_fn, features, labels, ModeKeys.TRAIN, params, config)
        steps[number] = spec.train_op
        if spec.host_call is None:
            return
        steps[number] = tf.group(spec.train_op, step_on_host(spec, host))

    if strategy is None:
        model()
    else:
        strategy.extended.call_for_each_replica(model)
    _check_global_step()
    with tf.device(host):
        losses = [specs[number].loss for number in range(replicas)]
        loss = _shown_loss(losses, strategy, config.device.iterations_per_loop)
        with tf.control_dependencies([*steps.values(), loss]):
            train_op = v1.group(*[v1.assign_add(part, 1) for part in parts(v1.train.get_global_step())])
    return specs[0], train_op, loss


def _held_global_step() -> Any:
    return parts(v1.train.get_global_step())[0]


def _check_global_step() -> None:
    """Raise an error if the model's train_op counts steps itself: each step would count twice."""
    handle = _held_global_step().handle
    initial = _held_global_step().initializer
    writers = [op for op in handle.consumers() if op.type.startswith("Assign") and op is not initial]
    if writers:
        raise ValueError(
            f"the train_op changes global_step ({writers[0].name}): the Estimator counts steps itself. Leave "
            "global_step out of optimizer.minimize() and apply_gradients()"
        )


def _shown_loss(losses: Sequence[Any], strategy: Any, iterations: int) -> Any:
    """Return the loss over all replicas, and over all steps of a loop."""
    how = distribute_utils.get_loss_reduction()
    loss = tf.add_n([tf.reduce_mean(tf.cast(loss, tf.float32)) for loss in losses])
    loss = loss / len(losses) if how == tf.distribute.ReduceOp.MEAN else loss
    if strategy is not None and strategy.extended._num_workers > 1:
        loss = strategy.extended._cross_device_ops.combined(how, loss)
    if iterations == 1:
        return tf.identity(loss, name="loss")
    total = v1.get_local_variable("loss_of_loop", initializer=0.0, trainable=False, use_resource=True)
    index = tf.cast(_held_global_step() % iterations, tf.float32)
    total = total.assign(tf.where(tf.equal(index, 0.0), loss, total + loss), read_value=True)
    return tf.identity(total / (index + 1.0), name="loss")


def _own_hooks(estimator: Any, state: TrainingState, loss: Any, listeners: Sequence[Any]) -> list[Any]:
    config = estimator.config
    collectives = config.train_distribute.extended._collectives if config.train_distribute is not None else None
    hooks: list[Any] = [v1.train.NanTensorHook(loss)]
    if config.save_checkpoints_steps or config.save_checkpoints_secs:
        steps, secs = config.save_checkpoints_steps, config.save_checkpoints_secs
        hooks.append(CheckpointHook(state, estimator.model_dir, config.is_chief, steps, secs, listeners, collectives))
    elif listeners:
        raise ValueError("saving_listeners need checkpoints: set save_checkpoints_steps or save_checkpoints_secs")
    if not config.is_chief:
        return hooks
    if config.log_step_count_steps:
        shown = {"loss": loss, "step": v1.train.get_global_step()}
        hooks.append(v1.train.LoggingTensorHook(shown, every_n_iter=config.log_step_count_steps))
    if config.save_summary_steps:
        Path(estimator.model_dir).mkdir(parents=True, exist_ok=True)
        steps, summaries = config.save_summary_steps, v1.summary.merge_all()
        hooks.append(v1.train.SummarySaverHook(steps, output_dir=estimator.model_dir, summary_op=summaries))
        if config.log_step_count_steps:
            hooks.append(v1.train.StepCounterHook(config.log_step_count_steps, output_dir=estimator.model_dir))
    return hooks
