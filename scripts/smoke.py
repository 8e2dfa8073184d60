"""A smoke test of an installed khorovod, without pytest and without the checkout on the path.

usage: horovodrun -np 2 python scripts/smoke.py [FRAMEWORK...]   (numpy is always tried)

On each framework: an allreduce, a broadcast, an allgather, and a step of training that leaves equal weights.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import numpy as np


def check_numpy() -> Any:
    """Collectives of arrays and objects."""
    import horovod.numpy as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ones = np.ones(1000, np.float32)
    assert (hvd.allreduce(ones * (rank + 1), op=hvd.Sum) == size * (size + 1) / 2).all()
    assert (hvd.broadcast(ones * rank, 0) == 0).all()
    assert hvd.allgather(ones[:2] * rank).shape == (2 * size,)
    assert hvd.allgather_object(rank) == list(range(size))
    return hvd


def check_torch() -> list[np.ndarray[Any, Any]]:
    """A step of SGD."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def check_tensorflow() -> list[np.ndarray[Any, Any]]:
    """A step with a tape, and collectives in a tf.function."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    weight = tf.Variable(tf.random.stateless_normal([4, 2], [hvd.rank(), 0]))
    hvd.broadcast_variables([weight], root_rank=0)

    @tf.function
    def step(data: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(data @ weight)
        [gradient] = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
        weight.assign_sub(0.1 * gradient)

    step(tf.random.stateless_normal([3, 4], [hvd.rank(), 1]))
    return [weight.numpy()]


def check_keras() -> list[np.ndarray[Any, Any]]:
    """One epoch of fit()."""
    import keras

    import horovod.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    data = np.random.default_rng(hvd.rank()).normal(size=(8, 4)).astype(np.float32)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(data, data[:, :2], batch_size=4, verbose=0, callbacks=callbacks)
    return list(model.get_weights())


def check_jax() -> list[np.ndarray[Any, Any]]:
    """A step of optax in jit."""
    import jax
    import optax

    import horovod.jax as hvd

    hvd.init()
    weight = hvd.broadcast_parameters(jax.random.normal(jax.random.key(hvd.rank()), (4, 2)), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    data = jax.random.normal(jax.random.key(hvd.rank() + 10), (3, 4))

    @jax.jit
    def step(weight: Any, state: Any) -> Any:
        gradient = jax.grad(lambda weight: (data @ weight).sum())(weight)
        updates, state = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates)

    return [np.asarray(step(weight, optimizer.init(weight)))]


CHECKS = {"torch": check_torch, "tensorflow": check_tensorflow, "keras": check_keras, "jax": check_jax}


def main(frameworks: list[str]) -> None:
    """Check numpy and the frameworks named; all ranks must hold the same weights."""
    hvd = check_numpy()
    for name in frameworks:
        weights = np.concatenate([weight.reshape(-1) for weight in CHECKS[name]()])
        everywhere = hvd.allgather_object(weights.tobytes())
        assert len(set(everywhere)) == 1, f"{name}: the ranks hold different weights"
    if hvd.rank() == 0:
        print("smoke test passed:", ", ".join(["numpy", *frameworks]), f"(khorovod {version('khorovod')})")
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
