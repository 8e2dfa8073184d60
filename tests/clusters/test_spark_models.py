"""Models, losses, optimizers and files that Spark's estimators take."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from spark_fits import MARKS, Processes, columns_of, df, mae, session, torch_estimator

from horovod.errors import RequestError
from horovod.spark.common import training
from horovod.spark.common.store import Store
from horovod.spark.common.writing import write

pytestmark = MARKS

__all__ = ["df", "session"]  # fixtures


def test_a_resumed_run_of_keras_draws_other_masks(df: Any, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    from horovod.spark.keras import KerasEstimator

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    for epochs in (1, 2):
        trained = KerasEstimator(
            store=Store.create(str(tmp_path)), model=model, optimizer=keras.optimizers.SGD(0.0), loss="mse",
            feature_cols=["extra"], label_cols=["label"], label_shapes=[[-1, 1]], batch_size=99, epochs=epochs,
            shuffle=False, backend=Processes(), run_id="one", verbose=0,
        ).fit(df)  # fmt: skip
    first, second = trained.getHistory()["loss"]
    assert first != second


def test_callbacks_of_keras_that_write_files_run_on_one_rank(df: Any, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    from horovod.spark.keras import KerasEstimator

    def note(name: str) -> None:
        import horovod.keras as hvd

        (tmp_path / f"{name}.{hvd.rank()}").touch()

    class Noted(keras.callbacks.CSVLogger):  # type: ignore[misc, name-defined]
        def on_train_end(self, logs: Any = None) -> None:
            super().on_train_end(logs)
            note("writer")

    def estimator(*callbacks: Any) -> Any:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        return KerasEstimator(
            store=Store.create(str(tmp_path / "store")), model=model, optimizer=keras.optimizers.SGD(0.1), loss="mse",
            feature_cols=["extra"], label_cols=["label"], backend=Processes(), verbose=0, callbacks=list(callbacks),
        )  # fmt: skip

    everywhere = keras.callbacks.LambdaCallback(on_train_end=lambda logs: note("own"))
    estimator(Noted(str(tmp_path / "log")), everywhere).fit(df)
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["own.0", "own.1", "writer.0"]
    with pytest.raises(RequestError, match="must not have BackupAndRestore"):
        estimator(keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))).fit(df)


def test_a_keras_model_may_be_a_subclass_and_a_loss_gets_labels_of_the_outputs_shape() -> None:
    keras = pytest.importorskip("keras")
    from horovod.spark.keras import KerasModel
    from horovod.spark.keras.training import _Data

    class Net(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def build(self, shape: Any) -> None:
            self.layer.build(shape)
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.layer(inputs)

    class Squares(keras.Loss):  # type: ignore[misc]
        def call(self, label: Any, output: Any) -> Any:
            assert label.shape == output.shape
            return keras.ops.square(label - output)

    training: Any = SimpleNamespace(
        start=0, params=SimpleNamespace(label_shapes=None), parts=lambda batch: ([batch["x"]], [batch["y"]], None)
    )
    nets = {"subclass": Net(), "sequential": keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])}
    nets["subclass"].build((None, 1))
    for kind, model in nets.items():
        batch = {"x": np.arange(4.0).reshape(4, 1), "y": np.arange(4).reshape((4, 1) if kind == "subclass" else 4)}
        reader: Any = SimpleNamespace(stream=lambda first, batch=batch: itertools.repeat(batch))
        model.compile("sgd", Squares())
        model.fit(_Data(training, model, reader, 2, goes_on=False), verbose=0)
        (outputs,) = KerasModel._predictor({"model": model})([batch["x"]])
        kernel, bias = model.get_weights()
        np.testing.assert_allclose(outputs, batch["x"] @ kernel + bias, rtol=1e-5)


def test_torch_ranks_validate_and_resume_with_the_statistics_of_the_model_that_is_returned(
    df: Any, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Sequential):  # type: ignore[misc]
        steps = 0

        def forward(self, features: Any) -> Any:
            self.steps += self.training
            return super().forward(features)

        def get_extra_state(self) -> Any:
            return {"steps": self.steps}

        def set_extra_state(self, state: Any) -> None:
            self.steps = state["steps"]

    def fit(run_id: str, epochs: int) -> Any:
        torch.manual_seed(1)
        model = Net(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        own = {"model": model, "optimizer": optimizer, "feature_cols": ["features"], "epochs": epochs}
        return torch_estimator(Store.create(str(tmp_path)), **own, backend=Processes(), run_id=run_id).fit(df)

    whole, _, resumed = fit("whole", 2), fit("parts", 1), fit("parts", 2)
    assert resumed.getHistory() == whole.getHistory()
    assert resumed.getModel().steps == whole.getModel().steps > 0
    columns = columns_of(df)
    outputs = whole.getModel().eval()(torch.from_numpy(columns["features"])).detach().numpy()[:, 0]
    error = np.abs(outputs - columns["label"])[columns["held"]].mean()
    np.testing.assert_allclose(whole.getHistory()[-1]["validation"]["mae"], error, rtol=1e-9)


@pytest.mark.parametrize("framework", ["keras", "lightning"])
def test_ranks_validate_with_the_statistics_of_the_model_that_is_returned(
    df: Any, tmp_path: Path, framework: str
) -> None:
    pytest.importorskip(framework)
    more = {"feature_cols": ["features"], "label_cols": ["label"], "batch_size": 4, "epochs": 2, "validation": "held"}
    common = {"store": Store.create(str(tmp_path)), "backend": Processes(), "random_seed": 3, "verbose": 0} | more
    columns = columns_of(df)
    if framework == "keras":
        import keras

        from horovod.spark.keras import KerasEstimator

        net = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model = KerasEstimator(**common, model=net, optimizer="sgd", loss="mse", metrics=["mae"]).fit(df)
        found, outputs = model.getHistory()["val_mae"][-1], model.getModel().predict_on_batch(columns["features"])
    else:
        import lightning
        import torch

        from horovod.spark.lightning import TorchEstimator

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

            def forward(self, features: Any) -> Any:
                return self.net(features)

            def training_step(self, batch: Any, index: int) -> Any:
                return (self(batch["features"])[:, 0] - batch["label"]).square().mean()

            def validation_step(self, batch: Any, index: int) -> None:
                error = self(batch["features"])[:, 0] - batch["label"]
                self.log("val_mae", error.abs().mean(), sync_dist=True, batch_size=len(error))

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 0.01)

        model = TorchEstimator(**common, model=Module().double()).fit(df)
        found = model.getHistory()[-1]["val_mae"]
        outputs = model.getModel().eval()(torch.from_numpy(columns["features"])).detach().numpy()
    error = np.abs(outputs[:, 0] - columns["label"])[columns["held"]].mean()
    np.testing.assert_allclose(found, error, rtol=1e-5)


@pytest.mark.parametrize(("rows", "is_shuffled"), [(None, True), (0, False), (5, True)])
def test_a_buffer_of_no_rows_does_not_shuffle(
    df: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int | None, is_shuffled: bool
) -> None:
    monkeypatch.setattr(training, "broadcast_object", lambda value, *args, **more: value)
    store = Store.create(str(tmp_path))
    table, _ = write(df, store, None, ["label"], None, 0, 1)
    how = vars(torch_estimator(store, feature_cols=["label"], shuffle_buffer_size=rows)._values())
    job = training.TrainingJob(store, "one", 0, table, None, b"", lambda packed: how)
    reader = training.Training(job, 0, 1, lambda seed: None).train
    first, second = (np.concatenate([batch["label"] for batch in reader.batches(number)]) for number in range(2))
    assert sorted(first) == sorted(second)
    assert (list(first) != list(second)) == is_shuffled
    with pytest.raises(RequestError, match="shuffle_buffer_size must be 0 or more"):
        torch_estimator(store, shuffle_buffer_size=-1).fit(df)


def test_torch_metrics_have_names_of_their_own(df: Any, tmp_path: Path) -> None:
    def loss(output: Any, label: Any) -> float:
        return 1.0

    for metrics, name in (([mae, mae], "mae"), ([loss], "loss"), ([lambda x, y: x, lambda x, y: y], "<lambda>")):
        with pytest.raises(RequestError, match=f"two metrics would be '{name}' in the history"):
            torch_estimator(Store.create(str(tmp_path)), metrics=metrics).fit(df)


def test_torch_takes_one_sample_weight_for_each_row() -> None:
    torch = pytest.importorskip("torch")
    from horovod.spark.torch.training import _Trainer, losses_of, metrics_of

    how: Any = SimpleNamespace(
        feature_cols=["x"], label_cols=["y"], input_shapes=None, label_shapes=None, sample_weight_col="w",
        loss=torch.nn.MSELoss(), loss_constructors=None, metrics=None,
    )  # fmt: skip
    outputs, labels, weights = np.arange(4.0), np.array([0.0, 3.0, 1.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])
    trainer: Any = object.__new__(_Trainer)
    trainer.params, trainer.dtype, trainer.device = how, torch.float64, torch.device("cpu")
    trainer.losses, trainer.shares, trainer.metrics = losses_of(how), [1.0], metrics_of(how.metrics, how.label_cols)
    for shape in ((4,), (4, 1), (4, 1, 1)):
        trainer.training = SimpleNamespace(parts=lambda batch, w=weights.reshape(shape): ([outputs], [labels], w))
        assert float(trainer.loss(*trainer.batch({}))) == ((outputs - labels) ** 2 * weights).mean()
    trainer.training = SimpleNamespace(parts=lambda batch: ([outputs], [labels], np.ones((4, 4))))
    with pytest.raises(RequestError, match=r"one number for each row. Column 'w' has \(4,\)"):
        trainer.batch({})


@pytest.mark.parametrize("through", ["bytes", "lightning"])
def test_a_state_may_have_numbers_of_numpy(tmp_path: Path, through: str) -> None:
    torch = pytest.importorskip("torch")
    from horovod.spark.torch.tensors import load_state, state_bytes

    weights = [torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.Adam(weights, lr=np.float64(0.1), betas=(np.float64(0.5), 0.75))
    if through == "bytes":
        saved = load_state(state_bytes(optimizer.state_dict()))
    else:
        pytest.importorskip("lightning")
        from horovod.spark.lightning.training import _without_objects

        torch.save({"hyper_parameters": {"kind": Path}, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "a")
        _without_objects(tmp_path / "a", str(tmp_path / "b"))
        (saved,) = torch.load(tmp_path / "b", weights_only=True)["optimizer_states"]
    (group,) = saved["param_groups"]
    assert (group["lr"], group["betas"]) == (0.1, (0.5, 0.75))
    assert {type(group["lr"]), *map(type, group["betas"])} == {float}


def test_a_store_finds_the_files_that_spark_reads(tmp_path: Path) -> None:
    """Not those of unfinished writes, and of a table's log."""
    shown, hidden = ["a.parquet", "day=1/a.parquet", "_day=1/a.parquet"], ["_temporary/0/a.parquet", ".b/a.parquet"]
    for name in [*shown, *hidden, "_delta_log/1.checkpoint.parquet", "_a.parquet"]:
        (tmp_path / "_store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "_store" / name).touch()
    for prefix in (str(tmp_path), f"file://{tmp_path}"):
        found = Store.create(prefix).parquet_files(f"{prefix}/_store")
        assert found == sorted(f"{tmp_path}/_store/{name}" for name in shown)


class _Listed(LocalFileSystem):
    """Keeps listings, as fsspec's file systems of the cloud do."""

    protocol = "listed"

    def ls(self, path: str, detail: bool = False, **more: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True, **more)
        return [entry if detail else entry["name"] for entry in self.dircache[path]]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def test_a_store_finds_files_that_other_processes_write(tmp_path: Path) -> None:
    fsspec.register_implementation("listed", _Listed)
    store = Store.create(f"listed://{tmp_path}")
    for name in ("a", "b"):
        (tmp_path / f"{name}.parquet").touch()
        assert store.parquet_files(store.prefix_path)[-1] == f"{tmp_path}/{name}.parquet"
