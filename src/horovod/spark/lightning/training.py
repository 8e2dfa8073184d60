"""Training of a LightningModule on a rank."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import horovod.torch as hvd
from horovod.errors import RequestError
from horovod.spark.common.reading import Batch, Reader
from horovod.spark.common.training import Trained, Training, TrainingJob
from horovod.spark.torch.tensors import dtype_of, save_state, state_bytes, tensor_of

__all__ = ["package_of", "train"]

#: Packages with LightningModules: the module that has our strategy, and the one with trainer and callbacks.
_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def package_of(model: Any) -> Any:
    """Return the package whose LightningModule a model is: ``lightning.pytorch`` or ``pytorch_lightning``.

    Raises:
        RequestError: it is another object.
    """
    for base in type(model).__mro__:
        if base.__name__ == "LightningModule" and (name := base.__module__.partition(".")[0]) in _PACKAGES:
            return importlib.import_module(_PACKAGES[name])
    raise RequestError(
        f"model must be a LightningModule; horovod.spark.torch.TorchEstimator trains other modules. "
        f"Received: {type(model).__name__}"
    )


class _Batches(torch.utils.data.IterableDataset[Any]):
    """The batches of an epoch: tensors by column."""

    def __init__(self, training: Training, reader: Reader, steps: int, first: Callable[[], int]) -> None:
        self.training, self.reader, self.steps, self.first = training, reader, steps, first
        self.dtype = dtype_of(training.params.model)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self.reader.stream(self.first()), self.steps):
            yield self._tensors(batch)

    def _tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        made = {name: tensor_of(value, self.dtype) for name, value in batch.items()}
        params = self.training.params
        for names, shapes in ((params.feature_cols, params.input_shapes), (params.label_cols, params.label_shapes)):
            for name, shape in zip(names, shapes or (), strict=bool(shapes)):
                made[name] = made[name].reshape(shape)
        return made


class _Saver:
    """Writes a checkpoint after each epoch, once its metrics are known; a mixin before a package's ``Checkpoint``."""

    def __init__(self, training: Training, folder: str) -> None:
        self.training, self.folder = training, folder
        self.history = list(training.history)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Let ReduceLROnPlateau take the step of the epoch before, which Lightning makes after the checkpoint."""
        if not self.training.start or not module.automatic_optimization:
            return
        for each in trainer.lr_scheduler_configs:
            is_due = each.interval == "epoch" and self.training.start % each.frequency == 0
            if each.reduce_on_plateau and is_due and each.monitor in self.history[-1]:
                each.scheduler.step(self.history[-1][each.monitor])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self.training.params.terminate_on_nan and outputs is not None:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            if not torch.isfinite(loss).all():
                raise ValueError(f"the loss of batch {index} in epoch {trainer.current_epoch} is {float(loss)}")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Copy rank 0's buffers, those of the result, to all ranks: BatchNorm's statistics differ."""
        kept = module.state_dict()
        hvd.broadcast_parameters({name: value for name, value in module.named_buffers() if name in kept}, root_rank=0)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.history.append({"epoch": trainer.current_epoch} | metrics)
        if self.training.is_loud:
            print(self.history[-1], flush=True)
        path = Path(self.folder, "saved")
        trainer.save_checkpoint(path)  # all ranks must call it, only one writes
        self.training.save(trainer.current_epoch + 1, self.history, lambda name: _without_objects(path, name))


def _without_objects(path: Path, name: str) -> None:
    """Copy this rank's checkpoint without hyperparameters, because safe loading may refuse their objects."""
    state = torch.load(path, weights_only=False)
    for key in ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters"):
        state.pop(key, None)
    save_state(state, name)


def _listed(callbacks: Any) -> list[Any]:
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []


def train(job: TrainingJob) -> Trained | None:
    """Train on this rank."""
    hvd.init()
    training = Training(job, hvd.rank(), hvd.size(), torch.manual_seed)
    params = training.params
    package = package_of(params.model)
    strategy = importlib.import_module(f"horovod.{package.__name__.partition('.')[0]}").HorovodStrategy()
    with tempfile.TemporaryDirectory() as folder:
        saver: Any = type("Saver", (_Saver, package.callbacks.Checkpoint), {})(training, folder)
        use_gpu = params.use_gpu and params.num_gpus != 0 and torch.cuda.is_available()
        options = {
            "max_epochs": params.epochs, "accelerator": "gpu" if use_gpu else "cpu", "logger": params.logger or False,
            "log_every_n_steps": params.log_every_n_steps, "profiler": params.profiler, "num_sanity_val_steps": 0,
            "accumulate_grad_batches": params.backward_passes_per_step, "enable_progress_bar": False,
            "enable_model_summary": False, "default_root_dir": folder, "limit_val_batches": training.val_steps,
            "limit_train_batches": training.steps,
        } | (params.trainer_args or {})  # fmt: skip
        callbacks = [*(params.callbacks or []), *_listed(options.pop("callbacks", None)), saver]
        trainer = package.Trainer(strategy=strategy, callbacks=callbacks, **options)

        def loader(reader: Reader, steps: int, first: Callable[[], int]) -> Any:
            return torch.utils.data.DataLoader(_Batches(training, reader, steps, first), batch_size=None)

        data = loader(training.train, training.steps, lambda: trainer.current_epoch * training.steps)
        checks = training.val and loader(training.val, training.val_steps, lambda: 0)
        saved = None
        if training.state:
            saved = Path(folder, "before")
            saved.write_bytes(training.state)
        if training.epochs:
            trainer.fit(params.model, data, checks, ckpt_path=saved, weights_only=True)
        elif training.state:
            state = torch.load(Path(folder, "before"), weights_only=True, map_location="cpu")
            params.model.load_state_dict(state["state_dict"])
        state = {name: value.cpu() for name, value in params.model.state_dict().items()}
        return training.result(state_bytes(state), saver.history, training.shapes())
