"""``TorchEstimator`` and ``TorchModel`` for LightningModules."""

from __future__ import annotations

import functools
from typing import Any

from horovod.errors import RequestError
from horovod.spark.common.estimator import HorovodEstimator
from horovod.spark.common.params import has_params
from horovod.spark.common.training import Trained
from horovod.spark.lightning.training import package_of, train
from horovod.spark.torch.estimator import TorchModel as PlainModel
from horovod.spark.torch.tensors import load_state, predictor

__all__ = ["TorchEstimator", "TorchModel"]

_NO_EFFECT = "accepted, without effect here"


@has_params(
    (
        ("input_shapes", None, None, "shape of each input, its first entry -1 for the batch"),
        ("num_gpus", None, None, "0 to train on the CPU"),
        ("logger", None, None, "logger of Lightning"),
        ("log_every_n_steps", 50, None, "steps between two logs"),
        ("loader_num_epochs", None, None, _NO_EFFECT),
        ("terminate_on_nan", False, None, "whether to fail when the loss is not finite"),
        ("profiler", None, None, "profiler of Lightning"),
        ("trainer_args", None, None, "more arguments of lightning.Trainer, which win"),
        ("debug_data_loader", False, None, _NO_EFFECT),
        ("train_async_data_loader_queue_size", None, None, _NO_EFFECT),
        ("val_async_data_loader_queue_size", None, None, _NO_EFFECT),
    )
)
class TorchEstimator(HorovodEstimator):
    """Train a LightningModule, of ``lightning`` or ``pytorch_lightning``, on a DataFrame with several ranks.

    ``training_step`` gets a dict with a tensor for each column; ``forward`` gets the features, for ``transform``. Its
    arguments are those of ``HorovodEstimator``.
    """

    _train = staticmethod(train)
    #: The module defines most of these itself, and the strategy does not compress gradients.
    _unsupported = (
        *HorovodEstimator._unsupported, "optimizer", "loss", "loss_weights", "metrics", "gradient_compression",
    )  # fmt: skip

    @property
    def _callback(self) -> Any:
        return package_of(self.getOrDefault("model")).Callback

    def _check(self) -> None:
        super()._check()
        package_of(self.getOrDefault("model"))  # refuses other modules
        given = self.getOrDefault("trainer_args") or {}
        if "strategy" in given:
            raise RequestError("trainer_args must not have a strategy: the ranks train with HorovodStrategy")
        if not given.get("enable_checkpointing", True):
            raise RequestError("trainer_args must not have enable_checkpointing=False: give Store save_runs=False")

    def _model(self, objects: dict[str, Any], trained: Trained, run_id: str) -> Any:
        objects["model"].load_state_dict(load_state(trained.state))
        taken = {name: objects[name] for name in ("model", "input_shapes")}
        return TorchModel(**taken, **self._common(trained, run_id))


class TorchModel(PlainModel):
    """Predict with the ``forward`` of a LightningModule; its arguments are those of ``HorovodModel``."""

    _predictor = staticmethod(functools.partial(predictor, keeps_integers=True))
