"""``horovod.keras`` on the backend that KERAS_BACKEND names, beside the backend's own data parallelism.

Steps are those of ``model.fit()``. The peers: on torch ``fit()`` with the model in DDP; on JAX ``fit()`` under
``keras.distribution.DataParallel``, over Gloo; on TensorFlow MultiWorkerMirroredStrategy in a loop of its own, as
``fit()`` of Keras 3 fails under it, compared with that loop alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import horovod.keras as hvd
import horovod.numpy
from benchmarks.callers import Array, Caller
from benchmarks.models_keras import KerasTask, make_task
from horovod.bench.control import Agreement, Contender
from horovod.bench.stepping import Arm

__all__ = ["BACKEND", "arms", "contenders", "fit_arm", "make_task"]

_RATE = 0.01
_MakeArm = Callable[[KerasTask], Arm]
BACKEND = keras.backend.backend()


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes when each batch has ended: when the numbers that it gave can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note when the first batch begins."""
        if not self.marks:
            self.marks.append(time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note when a batch ends."""
        for value in (logs or {}).values():
            np.asarray(value)
        self.marks.append(time.perf_counter())


def fit_arm(
    name: str,
    task: KerasTask,
    model: Any,
    optimizer: Any,
    within: Callable[[], Any] = contextlib.nullcontext,
    read: Callable[[Any], Array] = keras.ops.convert_to_numpy,
) -> Arm:
    """Return an arm whose steps are batches of ``model.fit()``.

    Args:
        name: its row.
        task: holds the batch.
        model: what is trained.
        optimizer: trains it.
        within: gives the context in which Keras must stand.
        read: makes numpy's array of a variable.
    """
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with within():
        model.compile(optimizer=optimizer, loss=loss)

    def times(steps: int) -> list[float]:
        data = (np.concatenate([whole] * steps) for whole in (task.inputs, task.targets))
        clock = _Clock()
        with within():
            model.fit(*data, batch_size=len(task.inputs), shuffle=False, verbose=0, callbacks=[clock])
        return [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]

    def weights() -> Array:
        return np.concatenate([read(variable).reshape(-1) for variable in model.trainable_variables])

    return Arm(name, lambda: (times(1), None)[1], weights, times=times)


def _sgd() -> Any:
    return keras.optimizers.SGD(_RATE, momentum=0.9)


def _local(task: KerasTask) -> Arm:
    return fit_arm("no communication", task, task.model, _sgd())


def _horovod(task: KerasTask) -> Arm:
    model = task.new_model()
    hvd.broadcast_variables(model.weights, root_rank=0)
    return fit_arm("horovod", task, model, hvd.DistributedOptimizer(_sgd()))


def _mwms(control: Agreement) -> list[_MakeArm]:
    from benchmarks.mwms import mwms_arm
    from benchmarks.on_tensorflow import loop_arm

    loop = "loop, no communication"
    return [
        lambda task: loop_arm(loop, task.name, control.rank, task.tiny),
        lambda task: mwms_arm(control, task.name, task.tiny, base=loop),
    ]


def _ddp(control: Agreement) -> list[_MakeArm]:
    from benchmarks.keras_ddp import train_with_ddp
    from horovod.bench.gloo import start_gloo

    start_gloo(control)
    return [lambda task: fit_arm("ddp", task, train_with_ddp(task.new_model()), _sgd())]


def _data_parallel(control: Agreement) -> list[_MakeArm]:
    from benchmarks.jax_gloo import own_part, start_jax

    start_jax(control)
    everywhere = keras.distribution.DataParallel(auto_shard_dataset=False)

    def make(task: KerasTask) -> Arm:
        with everywhere.scope():
            model, optimizer = task.new_model(), _sgd()
        return fit_arm(
            "jax gloo", task, model, optimizer, everywhere.scope, lambda variable: np.asarray(own_part(variable.value))
        )

    return [make]


_PEERS = {"tensorflow": _mwms, "torch": _ddp, "jax": _data_parallel}


def arms(control: Agreement) -> Sequence[_MakeArm]:
    """Return the ways to train."""
    return (_local, _horovod, *_PEERS[BACKEND](control))


def _eager(array: Array) -> Callable[[], Any]:
    tensor = keras.ops.convert_to_tensor(array)
    return lambda: keras.ops.convert_to_numpy(hvd.allreduce(tensor, op=hvd.Sum, name="bench.keras"))


def contenders(control: Agreement, args: Any = None) -> list[Contender]:
    """Allreduce of numpy's arrays and of the backend's tensors, and what the backend's framework offers itself."""
    peer: Contender
    if BACKEND == "tensorflow":
        from benchmarks.mwms import Mwms

        peer = Mwms(control)
    elif BACKEND == "torch":
        from horovod.bench.on_torch import Gloo

        peer = Gloo(control)
    else:
        from benchmarks.jax_gloo import start_jax, sum_over_ranks

        start_jax(control)
        peer = Caller("jax gloo", control, sum_over_ranks)
    plain = horovod.numpy
    return [
        Caller("horovod numpy", control, lambda array: lambda: plain.allreduce(array, op=hvd.Sum, name="bench.numpy")),
        Caller("horovod keras", control, _eager),
        peer,
    ]
