"""``horovod.tensorflow`` beside MultiWorkerMirroredStrategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.numpy
import horovod.tensorflow as hvd
from benchmarks.callers import Array, Caller
from benchmarks.models_tensorflow import Task, make_task
from benchmarks.mwms import Mwms, mwms_arm
from benchmarks.sgd_tensorflow import sgd_step
from horovod.bench.control import Agreement, Contender
from horovod.bench.stepping import Arm

__all__ = ["arms", "contenders", "loop_arm", "make_task"]


def _eager(array: Array) -> Callable[[], Any]:
    tensor = tf.constant(array)
    return lambda: hvd.allreduce(tensor, op=hvd.Sum, name="bench.eager")


def _in_function(array: Array) -> Callable[[], Any]:
    tensor = tf.constant(array)
    call = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="bench.function"), autograph=False)
    return lambda: call(tensor)


def _empty_callback(array: Array) -> Callable[[], Any]:
    tensor = tf.constant(array)
    call = tf.function(lambda x: tf.numpy_function(lambda a: a, [x], x.dtype), autograph=False)
    return lambda: call(tensor)


def contenders(control: Agreement, args: Any = None) -> list[Contender]:
    """Allreduce of numpy's arrays, eager, and in a function; a callback that does nothing; and TensorFlow's ring."""
    plain = horovod.numpy
    return [
        Caller("horovod numpy", control, lambda array: lambda: plain.allreduce(array, op=hvd.Sum, name="bench.numpy")),
        Caller("horovod eager", control, _eager),
        Caller("horovod function", control, _in_function),
        Caller("empty callback", control, _empty_callback, is_sum=False),
        Mwms(control),
    ]


def _weights(task: Task) -> Array:
    return np.concatenate([np.asarray(variable).reshape(-1) for variable in task.model.trainable_variables])


def loop_arm(name: str, model: str, rank: int, tiny: bool) -> Arm:
    """Every rank trains alone, in a loop of its own.

    Args:
        name: its row.
        model: which.
        rank: picks the data.
        tiny: whether it is of smoke size.
    """
    return _alone(name, make_task(model, rank, tiny=tiny))


def _alone(name: str, task: Task) -> Arm:
    step = tf.function(sgd_step(task), autograph=False)
    return Arm(name, step, lambda: _weights(task), base=name)


def _local(task: Task) -> Arm:
    return _alone("no communication", task)


def _horovod(task: Task) -> Arm:
    hvd.broadcast_variables(task.model.variables, root_rank=0)
    step = sgd_step(task, wrap=lambda tape: hvd.DistributedGradientTape(tape, sparse_as_dense=True))
    return Arm("horovod", tf.function(step, autograph=False), lambda: _weights(task))


def arms(control: Agreement) -> Sequence[Callable[[Task], Arm]]:
    """Return the ways to train."""
    return (_local, _horovod, lambda task: mwms_arm(control, task.name, task.tiny))
