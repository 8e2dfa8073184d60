"""``TorchEstimator`` and ``TorchModel``."""

from __future__ import annotations

from typing import Any

import torch

from horovod.errors import RequestError
from horovod.spark.common.estimator import HorovodEstimator
from horovod.spark.common.model import HorovodModel
from horovod.spark.common.params import has_params
from horovod.spark.common.training import Trained
from horovod.spark.torch.tensors import load_state, predictor
from horovod.spark.torch.training import losses_of, metrics_of, train

__all__ = ["TorchEstimator", "TorchModel"]


@has_params(
    (
        ("input_shapes", None, None, "shape of each input, its first entry -1 for the batch"),
        ("loss_constructors", None, None, "functions that make the losses, with reduction='none' for sample weights"),
        ("train_minibatch_fn", None, None, "trains on one batch, instead of forward, loss, backward and step"),
    )
)
class TorchEstimator(HorovodEstimator):
    """Train a PyTorch module on a DataFrame with several ranks; its arguments are those of ``HorovodEstimator``."""

    _train = staticmethod(train)
    _unsupported = (*HorovodEstimator._unsupported, "callbacks")

    def _check(self) -> None:
        super()._check()
        value = self.getOrDefault
        if value("optimizer") is None or (value("loss") is None and not value("loss_constructors")):
            raise RequestError("TorchEstimator needs optimizer, and loss or loss_constructors")
        if not isinstance(value("optimizer"), torch.optim.Optimizer):
            raise RequestError(
                f"optimizer must be an object of torch.optim.Optimizer. Received: {value('optimizer')!r}"
            )
        known = {id(parameter) for parameter in value("model").parameters()}
        if any(id(p) not in known for group in value("optimizer").param_groups for p in group["params"]):
            raise RequestError("the optimizer has parameters that the model lacks; make it of model.parameters()")
        if value("train_minibatch_fn") and value("backward_passes_per_step") > 1:
            raise RequestError("train_minibatch_fn steps by itself; leave out backward_passes_per_step")
        params = self._values()
        losses_of(params)
        metrics_of(params.metrics, params.label_cols)

    def _model(self, objects: dict[str, Any], trained: Trained, run_id: str) -> Any:
        state = load_state(trained.state)
        objects["model"].load_state_dict(state["model"])
        objects["optimizer"].load_state_dict(state["optimizer"])
        taken = ("model", "optimizer", "loss", "loss_constructors", "input_shapes")
        return TorchModel(**{name: objects[name] for name in taken}, **self._common(trained, run_id))


@has_params(
    (
        ("input_shapes", None, None, "shape of each input, its first entry -1 for the batch"),
        ("optimizer", None, None, "optimizer with its state after the training"),
        ("loss", None, None, "loss of the training"),
        ("loss_constructors", None, None, "functions that made the losses"),
    )
)
class TorchModel(HorovodModel):
    """Predict with a PyTorch module; its arguments are those of ``HorovodModel``."""

    _predictor = staticmethod(predictor)
