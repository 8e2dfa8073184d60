"""The same training in each framework, whose end can be computed to the bit, for ``kill_loop``.

The model is linear and its loss a sum, so gradients are sums of whole numbers, whatever ranks they come from. SGD with
a momentum and a rate that are powers of two then gives the same bits in every framework, compiled or not.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from horovod.bindings.elastic.sampler import Deal
from horovod.bindings.elastic.shard import ArrayShard

__all__ = ["SERVERS", "Logged", "expected", "samples_are_whole", "train"]

ROWS, WIDTH, BATCH = 53, 3000, 2
RATE, MOMENTUM = 2.0**-10, 0.5
#: By name of a training: the server that has its framework loaded.
SERVERS = {
    "numpy": "torch",
    "torch": "torch",
    "torch-commit": "torch",
    "torch-passes": "torch",
    "tf-eager": "tensorflow",
    "tf-graph": "tensorflow",
    "tf-jit": "tensorflow",
    "jax": "jax",
    "keras-tensorflow": "keras-tensorflow",
    "keras-torch": "keras-torch",
    "keras-jax": "keras-jax",
    "tf_keras": "tf_keras",
}


def data() -> np.ndarray[Any, Any]:
    """All samples."""
    rows, columns = np.arange(ROWS)[:, None], np.arange(WIDTH)[None]
    return ((rows * 7 + columns * 3) % 5).astype(np.float32)


class Logged(ArrayShard):
    """A shard that notes which samples were used in which step: epoch, first and end of them, number of ranks."""

    def __init__(self, pick: Callable[[Any], Any]) -> None:
        self.log: tuple[tuple[int, int, int, int], ...] = ()
        super().__init__(pick, ROWS, BATCH)

    def confirm(self) -> None:
        import horovod.numpy as hvd

        before = self.taken
        super().confirm()
        if self.taken != before:
            self.log = (*self.log, (self.epoch, before, self.taken, hvd.size()))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log": self.log}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.log = tuple(map(tuple, state["log"]))


def samples_are_whole(log: Any) -> str:
    """Return why a log does not have each sample of each epoch exactly once; empty if it has."""
    epoch = taken = 0
    for entry in log:
        if entry[0] != epoch or entry[1] != taken:
            return f"{entry} follows epoch {epoch}, {taken} samples"
        taken = entry[2]
        if taken == ROWS:
            epoch, taken = epoch + 1, 0
    return "" if taken == 0 else f"the last epoch has {taken} samples"


def expected(log: Any, has_torch_formula: bool) -> np.ndarray[Any, Any]:
    """Return the weights after the steps of a log, computed on one rank that nobody disturbs."""
    x = data()
    weights, moment = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    for _, start, end, size in log:
        while start < end:  # several steps between two commits
            deal = Deal(ROWS - start, size, BATCH)
            shares = [start + deal.share(0, rank) for rank in range(size)]
            gradient = sum(x[share].sum(0) for share in shares)
            if has_torch_formula:
                moment = np.float32(MOMENTUM) * moment + gradient
                weights = weights - np.float32(RATE) * moment
            else:
                moment = np.float32(MOMENTUM) * moment - np.float32(RATE) * gradient
                weights = weights + moment
            start += deal.taken(1)
    return weights


def train(mode: str, folder: str) -> dict[str, Any]:
    """Train until there is a file "end", and to the end of that epoch; return weights, log and more."""
    with Path(folder, f"{os.getpid()}.stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR2, file, all_threads=True)
        try:
            log, weights, steps = _TRAININGS[mode](mode, lambda: Path(folder, "end").exists())
        finally:
            faulthandler.unregister(signal.SIGUSR2)
    return {"log": log, "weights": np.asarray(weights, np.float32).reshape(-1), "steps": steps}


def _loop(
    hvd: Any, state: Any, one: Callable[[Any, Any], None], is_over: Callable[[], bool], has_commits: bool = False
) -> None:
    import horovod.numpy

    @hvd.elastic.run
    def run(state: Any) -> None:
        while not state.over:
            for batch in state.data:
                one(state, batch)
            if has_commits:
                state.commit()
            state.epoch += 1
            state.data.set_epoch(state.epoch)
            state.over = bool(horovod.numpy.broadcast_object(is_over(), 0))

    run(state)


def _numpy(mode: str, is_over: Callable[[], bool]) -> Any:
    import horovod.numpy as hvd

    hvd.init()
    x = data()
    zeros = np.zeros(WIDTH, np.float32)
    state = hvd.elastic.NumpyState(w=zeros, m=zeros.copy(), data=Logged(lambda rows: x[rows]), epoch=0, over=False)

    @hvd.elastic.step
    def one(state: Any, batch: Any) -> None:
        gradient = hvd.allreduce(batch.sum(0), op=hvd.Sum, name="gradient")
        state.m = np.float32(MOMENTUM) * state.m + gradient
        state.w = state.w - np.float32(RATE) * state.m

    _loop(hvd, state, one, is_over)
    return state.data.log, state.w, state.progress


def _torch(mode: str, is_over: Callable[[], bool]) -> Any:
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    x = torch.from_numpy(data())
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    passes = 2 if mode == "torch-passes" else 1
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Sum, backward_passes_per_step=passes)
    state = hvd.elastic.TorchState(model, optimizer, data=Logged(lambda rows: x[rows]), epoch=0, over=False, batch=0)

    def one(state: Any, batch: Any) -> None:
        optimizer.zero_grad()
        for part in batch.tensor_split(passes):
            model(part).sum().backward()
        optimizer.step()

    def committed(state: Any, batch: Any) -> None:
        one(state, batch)
        state.batch += 1
        if state.batch % 3 == 0:
            state.commit()

    has_commits = mode == "torch-commit"
    _loop(hvd, state, committed if has_commits else hvd.elastic.step(one), is_over, has_commits)
    return state.data.log, model.weight.detach().numpy(), state.progress


def _tensorflow(mode: str, is_over: Callable[[], bool]) -> Any:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    x = data()
    w, m = tf.Variable(tf.zeros((WIDTH, 1))), tf.Variable(tf.zeros((WIDTH, 1)), trainable=False)
    count = tf.Variable(0, trainable=False)

    def compute(x: Any) -> None:
        count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ w)
        (gradient,) = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [w])
        m.assign(MOMENTUM * m + gradient)
        w.assign_sub(RATE * m)

    graph = tf.function(compute, jit_compile=mode == "tf-jit", reduce_retracing=True)
    step = compute if mode == "tf-eager" else graph
    shard = Logged(lambda rows: tf.constant(x[rows]))
    state = hvd.elastic.TensorFlowState([w, m, count], data=shard, epoch=0, over=False)

    @hvd.elastic.step
    def one(state: Any, batch: Any) -> None:
        step(batch)

    _loop(hvd, state, one, is_over)
    return state.data.log, w.numpy(), int(count)


def _jax(mode: str, is_over: Callable[[], bool]) -> Any:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    hvd.init()
    x = data()

    def compute(values: Any, batch: Any) -> Any:
        gradient = hvd.allreduce(jax.grad(lambda w: (batch @ w).sum())(values["w"]), op=hvd.Sum, name="gradient")
        m = MOMENTUM * values["m"] + gradient
        return {"w": values["w"] - RATE * m, "m": m, "count": values["count"] + 1}

    step = jax.jit(compute, donate_argnums=0)
    values = {"w": jnp.zeros(WIDTH), "m": jnp.zeros(WIDTH), "count": jnp.zeros((), jnp.int32)}
    state = hvd.elastic.JaxState(values=values, data=Logged(lambda rows: x[rows]), epoch=0, over=False)

    @hvd.elastic.step
    def one(state: Any, batch: Any) -> None:
        state.values = step(state.values, batch)

    _loop(hvd, state, one, is_over)
    return state.data.log, np.asarray(state.values["w"]), int(state.values["count"])


def _keras(mode: str, is_over: Callable[[], bool]) -> Any:
    keras: Any
    hvd: Any
    if mode == "tf_keras":
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        keras, add = tf.keras, tf.reduce_sum
    else:
        import keras

        import horovod.keras as hvd

        add = keras.ops.sum
    import horovod.numpy

    hvd.init()
    x = data()

    class Sum(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return add(y_pred, -1)

    model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((WIDTH, 1), np.float32)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=MOMENTUM), op=hvd.Sum)
    model.compile(optimizer=optimizer, loss=Sum(reduction="sum"))
    state = hvd.elastic.KerasState(model, over=False)
    shard = Logged(lambda rows: (x[rows], np.zeros((len(rows), 1), np.float32)))
    validation, mean = (-x[:4], np.zeros((4, 1), np.float32)), hvd.callbacks.MetricAverageCallback()

    @hvd.elastic.run
    def run(state: Any) -> None:
        while not state.over:
            found = hvd.elastic.fit(
                state, shard, epochs=state.epoch + 1, callbacks=[mean], validation_data=validation, verbose=0
            ).history
            # The weights are below 0, and so is the sum of the outputs, but not that of the validation.
            assert found.keys() == {"loss", "val_loss"} and found["loss"][-1] <= 0 <= found["val_loss"][-1], found
            state.over = bool(horovod.numpy.broadcast_object(is_over(), 0))

    run(state)
    return shard.log, model.get_weights()[0], int(optimizer.iterations.numpy())


_TRAININGS: dict[str, Callable[[str, Callable[[], bool]], Any]] = {
    "numpy": _numpy,
    "torch": _torch,
    "torch-commit": _torch,
    "torch-passes": _torch,
    "jax": _jax,
    **dict.fromkeys(("tf-eager", "tf-graph", "tf-jit"), _tensorflow),
    **dict.fromkeys(("keras-tensorflow", "keras-torch", "keras-jax", "tf_keras"), _keras),
}


def modes(wanted: str) -> Iterator[str]:
    """Yield the trainings that are asked for: their names, or beginnings of them, with commas; all if empty."""
    for name in SERVERS:
        if not wanted or any(name.startswith(each) for each in wanted.split(",")):
            yield name
