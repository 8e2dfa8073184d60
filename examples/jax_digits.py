"""Train a small CNN on scikit-learn's handwritten digits with JAX and optax, on as many processes as were started.

    python examples/jax_digits.py
    horovodrun -np 2 python examples/jax_digits.py --epochs 20

Lines for data-parallel training are marked ``hvd``: a shard of the data for each rank, a learning rate scaled by
the number of ranks and warmed up, the same start on all ranks, averaged gradients and metrics, output on rank 0 only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.jax as hvd

LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 3

Params = dict[str, Any]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_data(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """1,797 real images of 8 x 8 pixels; they come with scikit-learn, nothing is downloaded."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    return images[train], labels[train], images[test], labels[test]


def make_params(key: jax.Array) -> Params:
    keys = jax.random.split(key, 4)
    init = jax.nn.initializers.he_normal()
    return {
        "conv1": {"kernel": init(keys[0], (3, 3, 1, 16)), "bias": jnp.zeros(16)},
        "conv2": {"kernel": init(keys[1], (3, 3, 16, 32)), "bias": jnp.zeros(32)},
        "dense1": {"kernel": init(keys[2], (4 * 4 * 32, 64)), "bias": jnp.zeros(64)},
        "dense2": {"kernel": init(keys[3], (64, 10)), "bias": jnp.zeros(10)},
    }


def predict(params: Params, images: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
    x = images
    for layer in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(
            x, params[layer]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[layer]["bias"])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    if dropout_key is not None:
        x = jnp.where(jax.random.bernoulli(dropout_key, 0.75, x.shape), x / 0.75, 0)
    return x @ params["dense2"]["kernel"] + params["dense2"]["bias"]


def batches(count: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of this rank's batches of an epoch; as many and as large on all ranks."""
    order = np.random.default_rng(seed).permutation(count)
    # hvd: every rank shuffles alike and takes its own share of each step's images.
    step = size * hvd.size()
    for start in range(0, count - step + 1, step):
        yield order[start + hvd.rank() : start + step : hvd.size()]


def main() -> None:
    args = parse_args()
    hvd.init()
    train_images, train_labels, test_images, test_labels = load_data(args.seed)

    steps = len(train_images) // (args.batch_size * hvd.size())
    # hvd: size() times the batch bears a larger learning rate, reached step by step.
    warmup_steps = int(min(WARMUP_EPOCHS, args.epochs / 2) * steps)
    schedule = optax.warmup_cosine_decay_schedule(
        LEARNING_RATE, LEARNING_RATE * hvd.size(), warmup_steps, args.epochs * steps
    )
    optimizer = hvd.DistributedOptimizer(optax.adamw(schedule, weight_decay=1e-4))
    params = make_params(jax.random.key(args.seed))
    params = hvd.broadcast_parameters(params, root_rank=0)  # hvd: the same start
    state = optimizer.init(params)
    key = jax.random.key(args.seed + 1 + hvd.rank())  # hvd: dropout differs between ranks

    def loss(params: Params, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        logits = predict(params, images, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def train_step(params: Params, state: Any, key: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
        key, dropout_key = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, images, labels, dropout_key)
        updates, state = optimizer.update(grads, state, params)  # hvd: averages the gradients
        return optax.apply_updates(params, updates), state, key, value

    @jax.jit
    def evaluate(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        right = (predict(params, images).argmax(axis=1) == labels).sum()
        # hvd: each rank has counted its share of the images.
        right, count = hvd.allreduce((right, len(labels)), op=hvd.Sum, name="accuracy")
        return right / count

    started = time.perf_counter()
    for epoch in range(args.epochs):
        total = jnp.zeros(())
        for batch in batches(len(train_images), args.batch_size, args.seed + epoch):
            params, state, key, value = train_step(params, state, key, train_images[batch], train_labels[batch])
            total += value
        mean_loss = hvd.allreduce(total / steps, name="loss")  # hvd: the average is the default
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  training loss {mean_loss:.4f}")
    seconds = time.perf_counter() - started

    share = slice(hvd.rank(), None, hvd.size())
    accuracy = evaluate(params, test_images[share], test_labels[share])
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.2%} after {args.epochs} epochs in {seconds:.1f} s on {hvd.size()} process(es)")
    hvd.shutdown()


if __name__ == "__main__":
    main()
