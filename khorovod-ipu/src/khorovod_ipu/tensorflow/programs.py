"""Device programs: compile, repeat and pipeline, executed by TensorFlow on the host's processor."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import control_flow_util, while_loop
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, _UnreadVariable

from khorovod_ipu.tensorflow.replicas import own_context
from khorovod_ipu.tensorflow.settings import check_accepted

__all__ = [
    "OptimizerFunctionOutput", "PipelineSchedule", "RecomputationMode", "compiled", "pipeline", "repeat",
]  # fmt: skip

v1 = tf.compat.v1
DEVICE = "/device:IPU:0"
#: Values of two arguments of a pipeline that change no result.
PipelineSchedule = enum.Enum("PipelineSchedule", "Grouped Interleaved Sequential", start=0)
RecomputationMode = enum.Enum(
    "RecomputationMode", "Auto RecomputeThenBackpropagate RecomputeAndBackpropagateInterleaved"
)
#: Arguments of a pipeline: those that change no result, and the only values of the others.
_INERT = """
    backward_propagation_stages_poplar_options device_mapping forward_propagation_stages_poplar_options
    gradient_accumulation_dtype gradient_accumulation_for_captured_tensors name offload_activations
    offload_gradient_accumulation_buffers offload_weight_update_variables offload_weights pipeline_schedule
    recomputation_mode replicated_optimizer_state_sharding replicated_weight_sharding weight_update_poplar_options
"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "accumulate_outfeed": (None, False), "accumulate_outfeed_dtype": (None,), "batch_serialization_iterations": (1,),
    "continuous_weight_updates": (None, False), "outfeed_mask": (None,), "reduction_method": (None, "sum", "SUM"),
}  # fmt: skip


@contextlib.contextmanager
def _plain_loops() -> Iterator[None]:
    """Return a context in which TensorFlow 1 builds loops that can contain variables and collectives."""
    before = control_flow_util.ENABLE_CONTROL_FLOW_V2
    control_flow_util.ENABLE_CONTROL_FLOW_V2 = before and v1.get_default_graph().building_function
    try:
        yield
    finally:
        control_flow_util.ENABLE_CONTROL_FLOW_V2 = before


def _split(outputs: Any) -> tuple[list[Any], list[Any]]:
    """Split the results of a function into tensors and operations."""
    if outputs is None:
        return [], []
    flat = tf.nest.flatten(outputs) if isinstance(outputs, (list, tuple, dict)) else [outputs]
    # The result of `minimize(loss, global_step)` stands for an operation, too.
    flat = [value.op if isinstance(value, _UnreadVariable) else value for value in flat]
    operations = [value for value in flat if isinstance(value, tf.Operation)]
    tensors = [tf.convert_to_tensor(v) for v in flat if not isinstance(v, tf.Operation) and v is not None]
    return tensors, operations


def compiled(computation: Callable[..., Any], inputs: Sequence[Any] | None = None) -> Any:
    """Call a function on the device.

    Args:
        computation: function of the inputs.
        inputs: tensors.

    Returns:
        The list of the tensors that it returned; its operations run before any of them is available. Without
        tensors, the operation that runs everything.
    """
    with tf.name_scope("ipu_program"), tf.device(DEVICE):
        tensors, operations = _split(computation(*(inputs or ())))
        with tf.control_dependencies(operations):
            return [tf.identity(tensor) for tensor in tensors] if tensors else tf.no_op()


def _fed(body: Callable[..., Any], values: Sequence[Any], infeed_queue: Any) -> Any:
    if infeed_queue is None:
        return body(*values)
    element = infeed_queue._dequeue()
    if isinstance(element, dict):
        return body(*values, **element)
    return body(*values, *(element if isinstance(element, tuple) else (element,)))


def repeat(n: int, body: Callable[..., Any], inputs: Any = None, infeed_queue: Any = None, **accepted: Any) -> Any:
    """Call a function several times within one program.

    Args:
        n: number of calls.
        body: function of the inputs and an element of the queue; returns the inputs of the next call.
        inputs: inputs of the first call.
        infeed_queue: queue that supplies the elements.
        accepted: other arguments of the SDK, without effect here.

    Returns:
        The results of the last call: a tensor or a list; without results, the operation that runs everything.
    """
    check_accepted("repeat()", accepted, "use_while_v1")
    start = [tf.convert_to_tensor(value) for value in tf.nest.flatten(inputs if inputs is not None else [])]

    def once(index: Any, *values: Any) -> list[Any]:
        tensors, operations = _split(_fed(body, values, infeed_queue))
        if len(tensors) != len(start):
            raise ValueError(
                f"the body of a loop must return as many tensors as it gets, {len(start)}. Received: {len(tensors)}"
            )
        with tf.control_dependencies([*operations, *tensors]):
            following = index + 1
        with tf.control_dependencies(operations):
            return [following, *(tf.identity(tensor) for tensor in tensors)]

    def lasts(index: Any, *_: Any) -> Any:
        return index < n

    replica, variables = own_context(), [tf.constant(0), *start]
    with _plain_loops():
        if replica is not None and replica.is_outermost:
            results = replica.loop(lasts, once, variables)
        else:
            results = while_loop.while_loop(lasts, once, variables, parallel_iterations=1)
    done, *values = results if isinstance(results, (list, tuple)) else (results,)
    if not values:
        return done.op
    return values if len(values) > 1 else values[0]


class OptimizerFunctionOutput(NamedTuple):
    """The result of the optimizer function of a pipeline.

    Attributes:
        opt: an optimizer of TensorFlow 1.
        loss: the tensor that it minimises.
        compute_gradients_args: more arguments of ``compute_gradients``.
        compute_gradients_kwargs: keyword arguments of ``compute_gradients``.
        apply_gradients_args: more arguments of ``apply_gradients``.
        apply_gradients_kwargs: keyword arguments of ``apply_gradients``.
    """

    opt: Any
    loss: Any
    compute_gradients_args: tuple[Any, ...] = ()
    compute_gradients_kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed
    apply_gradients_args: tuple[Any, ...] = ()
    apply_gradients_kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed


def pipeline(
    computational_stages: Sequence[Callable[..., Any]],
    gradient_accumulation_count: int | None = None,
    repeat_count: int = 1,
    inputs: Any = None,
    infeed_queue: Any = None,
    outfeed_queue: Any = None,
    optimizer_function: Callable[..., Any] | None = None,
    pipeline_depth: int | None = None,
    outfeed_loss: bool = False,
    **accepted: Any,
) -> Any:
    """Run stages one after another, accumulate the gradients of several batches, then make a step.

    The arithmetic is that of a pipeline, but stages of different batches do not run concurrently.

    Args:
        computational_stages: functions; the first gets the inputs and an element of the queue, each other one the
            results of the previous stage.
        gradient_accumulation_count: number of batches per step.
        repeat_count: number of steps per program.
        inputs: inputs of the first stage, the same for all batches.
        infeed_queue: queue that supplies the elements.
        outfeed_queue: gets the results of the last stage, of every batch.
        optimizer_function: gets the results of the last stage; returns an OptimizerFunctionOutput. None only runs.
        pipeline_depth: older name of ``gradient_accumulation_count``.
        outfeed_loss: whether the queue gets the loss instead of the results.
        accepted: other arguments of the SDK, such as ``device_mapping``, without effect here.

    Returns:
        The operation that runs everything.
    """
    check_accepted("pipeline()", accepted, _INERT, **_NEUTRAL)
    count = gradient_accumulation_count or pipeline_depth or 1
    given = tuple(tf.nest.flatten(inputs if inputs is not None else []))

    def step() -> Any:
        sums: list[Any] = []
        made: list[OptimizerFunctionOutput] = []

        def batch(index: Any, *elements: Any) -> list[Any]:
            values: Any = (*given, *elements)
            for stage in computational_stages:
                values = stage(*(values if isinstance(values, (tuple, list)) else (values,)))
            tensors, operations = _split(values)
            fed: Any = tensors[0] if len(tensors) == 1 else tensors
            if optimizer_function is not None:
                wanted = optimizer_function(*tensors)
                made.append(wanted)
                fed = wanted.loss if outfeed_loss else fed
                operations += _added(wanted, index, sums)
            if outfeed_queue is not None:
                operations.append(outfeed_queue.enqueue(fed))
            with tf.control_dependencies([*operations, *tensors]):
                return [index + 1]

        everything = repeat(count, batch, [tf.constant(0)], infeed_queue)
        if not made:
            return everything.op
        with tf.control_dependencies([everything]):
            summed = [(total.read_value(), variable) for total, variable in sums]
        (output, *_) = made
        return output.opt.apply_gradients(summed, *output.apply_gradients_args, **output.apply_gradients_kwargs)

    return repeat(repeat_count, step)


def _added(wanted: OptimizerFunctionOutput, index: Any, sums: list[Any]) -> list[Any]:
    """Add the gradients of one batch to the sums of earlier batches; record the sums."""
    pairs = wanted.opt.compute_gradients(wanted.loss, *wanted.compute_gradients_args, **wanted.compute_gradients_kwargs)
    added = []
    for gradient, variable in pairs:
        if gradient is None:
            continue
        total = _local_sum(variable)
        added.append(_sum_of(total, tf.convert_to_tensor(gradient), tf.equal(index, 0)))
        sums.append((total, variable))
    return added


def _sum_of(total: Any, gradient: Any, is_first: Any) -> Any:
    """Return an operation that assigns the first gradient, or adds a later one, because sums have no initial value."""

    def done(write: Callable[..., Any]) -> Any:
        with tf.control_dependencies([write(gradient, read_value=False)]):
            return tf.constant(0)

    return tf.cond(is_first, lambda: done(total.assign), lambda: done(total.assign_add))


def _local_sum(variable: Any) -> Any:
    """Return a new local variable outside collections, because scripts save and initialise only their own variables."""
    with tf.init_scope():
        return ResourceVariable(
            lambda: tf.zeros(variable.shape, variable.dtype.base_dtype), False, [], name="accumulated"
        )
