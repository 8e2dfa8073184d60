"""Training of a PyTorch model on a rank."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import horovod.torch as hvd
from horovod.errors import RequestError
from horovod.spark.common.reading import Batch
from horovod.spark.common.training import Trained, Training, TrainingJob
from horovod.spark.torch.tensors import dtype_of, load_state, outputs_of, reshaped, state_bytes, tensors

__all__ = ["losses_of", "metrics_of", "train"]

_Loss = Callable[..., torch.Tensor]


def losses_of(params: Any) -> list[_Loss]:
    """Return one loss for each label; with sample weights, losses that return a value for each row.

    Raises:
        RequestError: the number of losses does not fit, or a loss cannot return a value for each row.
    """
    weighted = {"reduction": "none"} if params.sample_weight_col else {}
    if params.loss_constructors:
        losses = [constructor(**weighted) for constructor in _list(params.loss_constructors)]
    else:
        losses = [_per_row(loss) if weighted else loss for loss in _list(params.loss)]
    if len(losses) == 1:
        losses *= len(params.label_cols)
    if len(losses) != len(params.label_cols):
        raise RequestError(f"{len(losses)} losses for {len(params.label_cols)} label columns")
    return losses


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _per_row(loss: Any) -> _Loss:
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        made = copy.copy(loss)
        vars(made)["reduction"] = "none"
        return made
    if "reduction" in inspect.signature(loss).parameters:
        return functools.partial(loss, reduction="none")
    raise RequestError(
        f"sample_weight_col needs a loss for each row, and {loss!r} has no argument reduction. "
        "Give it one, which is then 'none', or give loss_constructors"
    )


def metrics_of(metrics: Any, labels: Sequence[str]) -> list[tuple[str, int, Callable[..., Any]]]:
    """Return name, index of the label, and function of each metric.

    Args:
        metrics: functions of output and label, used for every label; or one list of functions per label; or None.
        labels: names of the labels.

    Raises:
        RequestError: a metric is not a function, two have the same name, or the number of lists does not fit.
    """
    metrics = metrics or []
    nested = [list(metrics)] * len(labels) if not any(isinstance(entry, list) for entry in metrics) else metrics
    if len(nested) != len(labels):
        raise RequestError(f"metrics has {len(nested)} lists for {len(labels)} label columns")
    found = []
    for index, (label, functions) in enumerate(zip(labels, nested, strict=True)):
        for function in functions:
            if not callable(function):
                raise RequestError(f"a metric must be a function of output and label. Received: {function!r}")
            name = getattr(function, "__name__", type(function).__name__)
            found.append((name if len(labels) == 1 else f"{label}_{name}", index, function))
    names = ["loss", *(name for name, *_ in found)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(f"two metrics would be {twice[0]!r} in the history; set __name__ of their functions")
    return found


class _Trainer:
    def __init__(self, training: Training) -> None:
        params = training.params
        self.training, self.params = training, params
        use_gpu = params.use_gpu and torch.cuda.is_available()
        self.device = (
            torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if use_gpu else torch.device("cpu")
        )
        self.model = params.model.to(self.device)
        self.optimizer: Any = params.optimizer
        if training.state:
            state = load_state(training.state)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.share()
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, self.model.named_parameters(), params.gradient_compression or hvd.Compression.none,
            params.backward_passes_per_step,
        )  # fmt: skip
        self.losses = losses_of(params)
        count = len(params.label_cols)
        self.shares = params.loss_weights or [1 / count] * count
        self.metrics = metrics_of(params.metrics, params.label_cols)
        self.dtype = dtype_of(self.model)

    def share(self) -> None:
        """Copy rank 0's parameters and buffers, those of the result, to all ranks: BatchNorm's statistics differ."""
        state = self.model.state_dict()  # a module's extra state may be any object
        values = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        hvd.broadcast_parameters(values, root_rank=0)

    def batch(self, arrays: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        features, labels, weights = self.training.parts(arrays)
        to = functools.partial(tensors, dtype=self.dtype, device=self.device)
        inputs = reshaped(to(features, self.params.feature_cols), self.params.input_shapes)
        if weights is not None:
            column = self.params.sample_weight_col
            if weights.size != len(weights):
                raise RequestError(
                    f"sample_weight_col must hold one number for each row. Column {column!r} has {weights.shape[1:]}"
                )
            weights = to([weights.reshape(-1)], [column])[0]
        return inputs, to(labels, self.params.label_cols), weights

    def fitted(self, outputs: Any, labels: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Reshape labels to the given shapes, or to the outputs' shapes if their numbers of elements agree."""
        outputs = outputs_of(outputs)
        if len(outputs) != len(labels):
            raise RequestError(f"the model has {len(outputs)} outputs for {len(labels)} label columns")
        if self.params.label_shapes:
            return outputs, reshaped(labels, self.params.label_shapes)
        pairs = zip(outputs, labels, strict=True)
        return outputs, [y.reshape(x.shape) if x.numel() == y.numel() else y for x, y in pairs]

    def loss(self, outputs: list[torch.Tensor], labels: list[torch.Tensor], weights: Any = None) -> torch.Tensor:
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for loss, share, output, label in zip(self.losses, self.shares, outputs, labels, strict=True):
            found = loss(output, label)
            if weights is not None:
                found = (found.reshape(len(weights), -1).mean(1) * weights).mean()
            total = total + share * found
        return total

    def minibatch(self, step: int, arrays: Batch) -> tuple[Any, ...]:
        """Train on one batch; gradients are summed over ``backward_passes_per_step`` batches."""
        inputs, labels, weights = self.batch(arrays)
        if self.params.train_minibatch_fn:
            outputs, loss = self.params.train_minibatch_fn(
                self.model, self.optimizer, self.fitted, self.loss, inputs, labels, weights
            )
            return (*self.fitted(outputs, labels), loss.detach(), len(inputs[0]))
        passes = self.params.backward_passes_per_step
        if step % passes == 0:
            together = min(passes, self.training.steps - step)
            if together != self.optimizer.backward_passes_per_step:
                self.optimizer.set_backward_passes_per_step(together)
            self.optimizer.zero_grad()
        outputs, labels = self.fitted(self.model(*inputs), labels)
        loss = self.loss(outputs, labels, weights)
        loss.backward()  # type: ignore[no-untyped-call]
        if (step + 1) % passes == 0 or step + 1 == self.training.steps:
            self.optimizer.step()
        return outputs, labels, loss.detach(), len(inputs[0])

    def validate(self, _: int, arrays: Batch) -> tuple[Any, ...]:
        inputs, labels, weights = self.batch(arrays)
        outputs, labels = self.fitted(self.model(*inputs), labels)
        return outputs, labels, self.loss(outputs, labels, weights), len(inputs[0])

    def epoch(self, batches: Any, steps: int, work: Callable[..., tuple[Any, ...]]) -> dict[str, float]:
        """Train or validate on the batches of an epoch, and return metrics over the rows of all ranks."""
        sums = torch.zeros(2 + len(self.metrics), dtype=torch.float64)
        for step in range(steps):
            outputs, labels, loss, rows = work(step, next(batches))
            with torch.no_grad():
                values = [float(metric(outputs[i], labels[i])) for _, i, metric in self.metrics]
            sums += rows * torch.tensor([1.0, float(loss), *values], dtype=torch.float64)
        rows, *totals = hvd.allreduce(sums, op=hvd.Sum, name="spark.metrics").tolist()
        names = ["loss", *(name for name, *_ in self.metrics)]
        return {name: total / rows for name, total in zip(names, totals, strict=True)}

    def write(self, path: str) -> None:
        Path(path).write_bytes(self.state())

    def state(self) -> bytes:
        return state_bytes({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def train(job: TrainingJob) -> Trained | None:
    """Train on this rank."""
    hvd.init()
    training = Training(job, hvd.rank(), hvd.size(), torch.manual_seed)
    trainer, history = _Trainer(training), list(training.history)
    stream = training.train.stream(training.start * training.steps)
    for epoch in training.epochs:
        trainer.model.train()
        record: dict[str, Any] = {"epoch": epoch, "train": trainer.epoch(stream, training.steps, trainer.minibatch)}
        trainer.share()
        if training.val:
            trainer.model.eval()
            with torch.no_grad():
                record["validation"] = trainer.epoch(training.val.stream(), training.val_steps, trainer.validate)
        history.append(record)
        if training.is_loud:
            print(record, flush=True)
        training.save(epoch + 1, history, trainer.write)
    return training.result(trainer.state(), history, training.shapes())
