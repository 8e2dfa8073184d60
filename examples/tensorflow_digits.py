"""Train a small CNN on scikit-learn's handwritten digits with TensorFlow, on as many processes as were started.

    python examples/tensorflow_digits.py
    horovodrun -np 2 python examples/tensorflow_digits.py --epochs 20

The training step is a ``tf.function``; gradients travel while its backward pass still runs. Lines for
data-parallel training are marked ``hvd``.
"""

from __future__ import annotations

import argparse
import time

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.tensorflow as hvd

BASE_LEARNING_RATE = 0.05


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_data(args: argparse.Namespace) -> tuple[tf.data.Dataset, tuple[tf.Tensor, tf.Tensor]]:
    """1,797 real images of 8 x 8 pixels; they come with scikit-learn, nothing is downloaded."""
    digits = load_digits()
    images, labels = (digits.images / 16.0).astype("float32")[..., None], digits.target
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train = tf.data.Dataset.from_tensor_slices((train_x, train_y))
    # hvd: all ranks shuffle alike, and each takes every size-th image; all take equally many steps. The order depends
    # on the global seed as well as on that of shuffle().
    tf.random.set_seed(args.seed)
    train = train.shuffle(len(train_y), seed=args.seed).shard(hvd.size(), hvd.rank())
    train = train.batch(args.batch_size, drop_remainder=True).take(len(train_y) // hvd.size() // args.batch_size)
    own = slice(hvd.rank(), None, hvd.size())
    return train, (tf.constant(test_x[own]), tf.constant(test_y[own]))


def make_model() -> tf.keras.Model:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(24, 3, padding="same", activation="relu"),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )
    assert isinstance(model, tf.keras.Model)
    return model


def main() -> None:
    args = parse_args()
    hvd.init()  # hvd: who am I, and who are the others
    train, (test_x, test_y) = load_data(args)
    tf.keras.utils.set_random_seed(args.seed + hvd.rank())  # dropout differs between ranks; so does the start, at first
    model = make_model()
    # hvd: size() times the batch bears size() times the learning rate.
    schedule = tf.keras.optimizers.schedules.CosineDecay(BASE_LEARNING_RATE * hvd.size(), args.epochs * len(train))
    optimizer = tf.keras.optimizers.SGD(schedule, momentum=0.9)
    optimizer.build(model.trainable_variables)
    cost = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images, labels):  # type: ignore[no-untyped-def]
        with tf.GradientTape() as tape:
            loss = cost(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # hvd: gradients of all ranks
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    hvd.broadcast_variables(model.variables, root_rank=0)  # hvd: the same start on all ranks
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    started = time.perf_counter()
    for epoch in range(args.epochs):
        losses = [step(images, labels) for images, labels in train]
        mean_loss = hvd.allreduce(tf.reduce_mean(losses), name="loss")  # hvd: the average is the default
        if hvd.rank() == 0:  # hvd: one rank speaks
            print(f"epoch {epoch + 1}/{args.epochs}  training loss {float(mean_loss):.4f}", flush=True)
    seconds = time.perf_counter() - started

    right = tf.reduce_sum(tf.cast(tf.argmax(model(test_x), axis=1) == test_y, tf.int32))
    counts = hvd.allreduce(tf.stack([right, len(test_y)]), op=hvd.Sum, name="accuracy")
    if hvd.rank() == 0:
        accuracy = int(counts[0]) / int(counts[1])
        print(f"test accuracy {accuracy:.2%} after {args.epochs} epochs in {seconds:.1f} s on {hvd.size()} process(es)")
    hvd.shutdown()


if __name__ == "__main__":
    main()
