"""Training of a Keras model on a rank."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import horovod.keras as hvd
from horovod._keras.unsafe import accumulated_gradients
from horovod.keras.optimizer import innermost
from horovod.spark.common.reading import Batch, Reader
from horovod.spark.common.training import Trained, Training, TrainingJob

__all__ = ["arrays_of", "shaped", "train", "weights_from"]

#: Callbacks that write files, of the same name on all ranks.
_WRITERS = keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint, keras.callbacks.TensorBoard


def shaped(value: np.ndarray[Any, Any], tensors: Sequence[Any] | None, index: int) -> np.ndarray[Any, Any]:
    """Return a column with Keras' dtype, reshaped to the model's input or output if its size matches.

    Args:
        value: rows of the column.
        tensors: ``inputs`` or ``outputs`` of the model; None for a model without them.
        index: index of the column among them.
    """
    if value.dtype.kind == "f":
        value = value.astype(keras.backend.floatx())
    wanted = tuple(tensors[index].shape[1:]) if tensors and index < len(tensors) else value.shape[1:]
    fits = None not in wanted and math.prod(wanted) == math.prod(value.shape[1:])
    return value.reshape(len(value), *wanted) if fits else value


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


class _Data(keras.utils.PyDataset):
    """Batches of an epoch; they can be read again, because Keras first reads some to learn their shapes."""

    def __init__(self, training: Training, model: Any, reader: Reader, steps: int, goes_on: bool) -> None:
        super().__init__()
        self.training, self.reader, self.steps, self.goes_on = training, reader, steps, goes_on
        self.inputs, self.outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
        self.epoch = training.start
        self._at: tuple[int, int] | None = None
        self._batches: Iterator[Batch] = iter(())

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Any:
        if self._at != (self.epoch, index):
            self._batches = self.reader.stream((self.epoch * self.steps if self.goes_on else 0) + index)
        self._at = (self.epoch, index + 1)
        features, labels, weights = self.training.parts(next(self._batches))
        inputs = [shaped(value, self.inputs, i) for i, value in enumerate(features)]
        if shapes := self.training.params.label_shapes:
            targets = [shaped(value, None, 0).reshape(shape) for value, shape in zip(labels, shapes, strict=True)]
        else:
            targets = [shaped(value, self.outputs, i) for i, value in enumerate(labels)]
        batch = (_one_or_all(inputs), _one_or_all(targets))
        if weights is None:
            return batch
        return (*batch, _one_or_all([shaped(weights, None, 0)] * len(targets)))


class _Progress(keras.callbacks.Callback):
    """Tells the data the number of the epoch, and writes a checkpoint after each epoch."""

    def __init__(self, training: Training, data: _Data, best: Path) -> None:
        super().__init__()
        self.training, self.data, self.best = training, data, best
        self.history: dict[str, list[Any]] = dict(training.history or {})

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.data.epoch = epoch

    def on_test_begin(self, logs: Any = None) -> None:
        # Validate with the statistics of BatchNormalization that the result has. Seeds, which are no weights, differ.
        hvd.broadcast_variables(self.model.non_trainable_weights, root_rank=0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(np.asarray(value).tolist())
        # A resumed run takes rank 0's sums of an unfinished step on all ranks: make them equal, with the same mean.
        for held in accumulated_gradients(innermost(self.model.optimizer)):
            held.assign(hvd.allreduce(held))
        self.training.save(epoch + 1, self.history, self._write)

    def _write(self, path: str) -> None:
        parts: dict[str, Any] = {"last": np.frombuffer(_file_of(self.model), np.uint8)}
        value = getattr(self.training.params.checkpoint_callback, "best", None)
        if value is not None and self.best.exists():
            parts |= {"best": np.frombuffer(self.best.read_bytes(), np.uint8), "value": float(value)}
        with open(path, "wb") as file:
            np.savez(file, **parts)


def _restore(state: bytes, model: Any, callback: Any, best: Path) -> None:
    """Reverse ``_Progress._write``."""
    with np.load(io.BytesIO(state), allow_pickle=False) as saved:
        _load_file(model, saved["last"].tobytes())
        if "best" in saved and callback:
            best.write_bytes(saved["best"].tobytes())
            callback.best = float(saved["value"])


def _file_of(model: Any) -> bytes:
    """Return the weights of a model and of its optimizer as a file's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.weights.h5")
        model.save_weights(path)
        return path.read_bytes()


def _load_file(model: Any, state: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.weights.h5")
        path.write_bytes(state)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)


def arrays_of(model: Any) -> bytes:
    """Return a model's weights as bytes that contain only numbers."""
    file = io.BytesIO()
    np.savez(file, *model.get_weights())
    return file.getvalue()


def weights_from(state: bytes) -> list[np.ndarray[Any, Any]]:
    """Reverse ``arrays_of``."""
    with np.load(io.BytesIO(state), allow_pickle=False) as arrays:
        return [arrays[f"arr_{index}"] for index in range(len(arrays.files))]


def _pin_gpu(use_gpu: bool) -> None:
    """Restrict this rank to the GPU of its local rank; otherwise the backend would use another GPU or all."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        found = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices(found[hvd.local_rank() % len(found)] if found and use_gpu else [], "GPU")
    elif backend == "torch" and use_gpu:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())


def train(job: TrainingJob) -> Trained | None:
    """Train on this rank."""
    hvd.init()
    training = Training(job, hvd.rank(), hvd.size(), lambda seed: keras.utils.set_random_seed(seed % (1 << 32)))
    params = training.params
    _pin_gpu(params.use_gpu)
    model, losses = params.model, params.loss
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.get(params.optimizer), compression=params.gradient_compression,
        backward_passes_per_step=params.backward_passes_per_step,
    )  # fmt: skip
    loss = losses[0] if isinstance(losses, list | tuple) and len(losses) == 1 else losses
    model.compile(optimizer, loss, loss_weights=params.loss_weights, metrics=params.metrics or None)
    data = _Data(training, model, training.train, training.steps, goes_on=True)
    checks = training.val and _Data(training, model, training.val, training.val_steps, goes_on=False)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
        *(each for each in params.callbacks or [] if hvd.rank() == 0 or not isinstance(each, _WRITERS)),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        best = Path(folder, "best.weights.h5")
        if params.checkpoint_callback:
            params.checkpoint_callback.filepath, params.checkpoint_callback.save_weights_only = str(best), True
            callbacks.append(params.checkpoint_callback)
        progress = _Progress(training, data, best)
        if training.state:
            _restore(training.state, model, params.checkpoint_callback, best)
        if training.epochs:
            model.fit(
                data, validation_data=checks, epochs=params.epochs, initial_epoch=training.start, shuffle=False,
                verbose=2 if training.is_loud else 0, callbacks=[*callbacks, progress],
            )  # fmt: skip
        else:  # as fit() does at its end: take the average of the weights, if the optimizer keeps one
            model.optimizer.finalize_variable_values(model.trainable_variables)
        if best.exists():
            model.load_weights(best)
    return training.result(arrays_of(model), progress.history, training.shapes())
