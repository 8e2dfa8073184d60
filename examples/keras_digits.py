"""Train a small CNN on scikit-learn's handwritten digits with Keras, on as many processes as were started.

    KERAS_BACKEND=torch python examples/keras_digits.py
    KERAS_BACKEND=jax horovodrun -np 2 python examples/keras_digits.py --epochs 20 --checkpoint digits.keras

The backend is what KERAS_BACKEND says: tensorflow, torch or jax. Lines for data-parallel training are marked
``hvd``: a shard of the data for each rank, a learning rate scaled by the number of ranks and warmed up, the same start
on all ranks, averaged gradients and metrics, output and files on rank 0 only.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.keras as hvd

LEARNING_RATE = 3e-3
WARMUP_EPOCHS = 3
#: After this part of all epochs the learning rate is a tenth.
DECAY_AFTER = 0.6


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, help="file in which rank 0 keeps the best model (default: none kept)"
    )
    return parser.parse_args()


def load_data(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """1,797 real images of 8 x 8 pixels; they come with scikit-learn, nothing is downloaded."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    train, test = train_test_split(range(len(images)), test_size=0.2, random_state=seed, stratify=digits.target)
    return images[train], digits.target[train], images[test], digits.target[test]


def make_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.4),
            layers.Dense(10),
        ]
    )


def main() -> None:
    args = parse_args()
    hvd.init()
    keras.utils.set_random_seed(args.seed + hvd.rank())  # hvd: dropout differs between ranks
    train_images, train_labels, test_images, test_labels = load_data(args.seed)

    # hvd: every rank has its own images, and as many as any other.
    each = len(train_images) // hvd.size()
    mine = slice(hvd.rank() * each, (hvd.rank() + 1) * each)
    # hvd: size() times the batch bears a larger learning rate, reached step by step.
    rate = LEARNING_RATE * hvd.size()
    model = make_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.AdamW(rate)),  # hvd: averages the gradients
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # hvd: the same start
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, WARMUP_EPOCHS),
        hvd.callbacks.LearningRateScheduleCallback(
            rate, lambda epoch: 0.1, start_epoch=max(WARMUP_EPOCHS, int(args.epochs * DECAY_AFTER))
        ),
    ]
    if args.checkpoint:
        callbacks.append(hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(args.checkpoint)))
    started = time.perf_counter()
    model.fit(
        train_images[mine],
        train_labels[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,  # hvd: one rank talks
    )
    seconds = time.perf_counter() - started

    share = slice(hvd.rank(), None, hvd.size())
    right = np.argmax(model.predict(test_images[share], verbose=0), axis=1) == test_labels[share]
    # hvd: each rank has counted its share of the images.
    found, count = np.asarray(hvd.allreduce(np.float32([right.sum(), len(right)]), op=hvd.Sum, name="accuracy"))
    if hvd.rank() == 0:
        print(
            f"test accuracy {found / count:.2%} after {args.epochs} epochs in {seconds:.1f} s on {hvd.size()} "
            f"process(es), backend {keras.backend.backend()}"
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
