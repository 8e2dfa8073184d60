"""Estimators on a real Spark session: ranks train as one process does on the rows that they read."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from spark_fits import (
    BATCH,
    EPOCHS,
    MARKS,
    Processes,
    assert_same,
    columns_of,
    df,
    mae,
    net,
    reader_of,
    session,
    torch_alone,
    torch_estimator,
    weights_of,
)  # fmt: skip

from horovod.errors import RequestError
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.columns import to_numpy
from horovod.spark.common.reading import Reader
from horovod.spark.common.store import DBFSLocalStore, HDFSStore, LocalStore, Store
from horovod.spark.common.writing import find, write

pytestmark = MARKS

__all__ = ["df", "session"]  # fixtures
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import this file


@pytest.mark.parametrize(("weighted", "passes"), [(False, 1), (True, 3)], ids=["plain", "weights-and-passes"])
def test_torch_ranks_train_as_one_process_does(df: Any, tmp_path: Path, weighted: bool, passes: int) -> None:
    store = Store.create(str(tmp_path))
    train, val = write(df, store, None, df.columns, "held", 3, 6)
    more = {"sample_weight_col": "weight"} if weighted else {}
    estimator = torch_estimator(store, backend=Processes(), backward_passes_per_step=passes, **more)
    model = estimator.fit_on_parquet()

    readers = [reader_of(store, train, rank, shuffles=True, seed=3) for rank in range(2)]
    batches = [step for epoch in range(EPOCHS) for step in zip(*(r.batches(epoch) for r in readers), strict=True)]
    alone = torch_alone(batches, weighted, passes)
    assert_same(weights_of(model.getModel()), weights_of(alone))

    columns = columns_of(df)
    last = model.getHistory()[-1]
    import torch

    outputs = alone(torch.from_numpy(columns["features"]), torch.from_numpy(columns["extra"])).detach().numpy()[:, 0]
    error = (outputs - columns["label"])[columns["held"]]
    weights = columns["weight"][columns["held"]] if weighted else 1
    np.testing.assert_allclose(last["validation"]["loss"], (error**2 * weights).mean(), rtol=1e-9)
    np.testing.assert_allclose(last["validation"]["mae"], np.abs(error).mean(), rtol=1e-9)
    assert (last["epoch"], len(model.getHistory()), val is not None) == (EPOCHS - 1, EPOCHS, True)

    found = sorted(model.transform(df).collect(), key=lambda row: row.weight)
    np.testing.assert_allclose([row["label__output"] for row in found], outputs, rtol=1e-9)
    assert [row.features for row in found] == [row.features for row in sorted(df.collect(), key=lambda r: r.weight)]


def test_a_known_run_resumes(df: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a file system that Spark does not know."""
    store = Store.create("dir://folder", storage_options={"path": str(tmp_path), "target_protocol": "file"})
    whole = torch_estimator(store, backend=Processes(), run_id="whole").fit(df)
    torch_estimator(store, backend=Processes(), run_id="parts", epochs=1).fit(df)
    assert [Path(path).name for path in store.get_checkpoints("parts")] == ["epoch-1.zip"]
    resumed = torch_estimator(store, backend=Processes(), run_id="parts", verbose=1).fit(df)
    assert "run 'parts' goes on from its checkpoint" in capfd.readouterr().out
    assert resumed.getHistory() == whole.getHistory()
    assert_same(weights_of(resumed.getModel()), weights_of(whole.getModel()))
    assert [Path(path).name for path in store.get_checkpoints("parts")] == ["epoch-2.zip"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["runs"], "data of a fit is removed after it"
    with pytest.warns(UserWarning, match="run 'parts' had finished its 2 epochs"):
        torch_estimator(store, backend=Processes(), run_id="parts").fit(df)


def test_pipelines_are_saved_and_loaded(df: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    store = Store.create(str(tmp_path / "store"), storage_options={"auto_mkdir": True})
    assembler = VectorAssembler(inputCols=["features", "flag"], outputCol="joined")
    own = {"feature_cols": ["joined", "extra"], "validation": 0.25, "sample_weight_col": None}
    estimator = torch_estimator(store, num_proc=2, **own)
    estimator.getModel().first = __import__("torch").nn.Linear(4, 4).double()
    estimator.setOptimizer(__import__("torch").optim.SGD(estimator.getModel().parameters(), 0.01))
    Pipeline(stages=[assembler, estimator]).save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline"))
    stage = loaded.getStages()[1]
    assert (stage.uid, stage.getBatchSize(), stage.getStore().storage_options) == (estimator.uid, BATCH, {})
    assert stage.getStore().prefix_path == store.prefix_path
    assert stage.isSet("sample_weight_col") and stage.getSampleWeightCol() is None
    known = {id(parameter) for parameter in stage.getModel().parameters()}
    assert {id(p) for p in stage.getOptimizer().param_groups[0]["params"]} == known

    fitted = loaded.fit(df)  # by Spark's own tasks
    wanted = [row["label__output"] for row in fitted.transform(df).collect()]
    fitted.save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    assert [row["label__output"] for row in again.transform(df).collect()] == wanted
    assert again.stages[1].getHistory() == fitted.stages[1].getHistory()


@pytest.mark.parametrize("shuffles", [False, True], ids=["in-order", "shuffled"])
def test_a_shard_larger_than_the_buffer_streams(session: Any, tmp_path: Path, shuffles: bool) -> None:
    rows = 5001
    big = session.range(rows).selectExpr("array(id, id + 1) as pair", "id", "id % 3 = 0 as third")
    store = Store.create(f"file://{tmp_path}")
    train, val = write(big, store, "big", ["pair", "id"], "third", 0, 3)
    assert val is not None and (train.rows, val.rows) == (3334, 1667)
    seen: list[list[Any]] = []
    for rank in range(3):
        reader = Reader(train, store, ["pair", "id"], rank, 3, 64, shuffles=shuffles, buffer_rows=256, seed=1)
        passes = [list(reader.batches(number)) for number in range(2)]
        assert {len(batches) for batches in passes} == {reader.steps} == {18}
        for batches in passes:
            for batch in batches:
                np.testing.assert_array_equal(batch["pair"], batch["id"][:, None] + [0, 1])
        first, second = ([*np.concatenate([batch["id"] for batch in batches])] for batches in passes)
        assert sorted(first) == sorted(second) and (first != second) == shuffles
        more = reader.stream(20)
        np.testing.assert_array_equal(next(more)["id"], passes[1][2]["id"])
        seen.append(first)
    assert sorted(itertools.chain(*seen)) == [number for number in range(rows) if number % 3]
    found = find(store, store.get_train_data_path("big"))
    assert (found.groups, [f"file://{path}" for path in found.files]) == (train.groups, list(train.files))


def test_columns_that_a_transformation_makes(session: Any, df: Any, tmp_path: Path) -> None:
    """Two outputs and labels, metrics for each, features from bytes, on rows that stay in memory."""
    import torch

    def unpack(frame: Any) -> Any:
        return frame.assign(pixels=[np.frombuffer(entry, np.float64) for entry in frame["raw"]])

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 3)

        def forward(self, image: Any) -> Any:
            assert image.shape[1:] == (2, 2)
            found = self.net(image.flatten(1))
            return found[:, :1], found[:, 1:]

    rows = [(np.arange(4.0) + n, n % 2, [float(n), 1.0]) for n in range(10)]
    frame = session.createDataFrame([(bytearray(x.tobytes()), a, b) for x, a, b in rows], ["raw", "one", "two"])
    torch.manual_seed(1)
    model = Two().double()
    estimator = torch_estimator(
        Store.create(str(tmp_path)), backend=Processes(), model=model, validation=None, epochs=3, batch_size=5,
        optimizer=torch.optim.SGD(model.parameters(), 0.001), feature_cols=["pixels"], label_cols=["one", "two"],
        input_shapes=[[-1, 2, 2]], transformation_fn=unpack, transformation_removed_fields=["raw"],
        metrics=[[mae], []],
        loss=[torch.nn.functional.mse_loss, torch.nn.L1Loss()], loss_weights=[0.25, 0.75], inmemory_cache_all=True,
    )  # fmt: skip
    fitted = estimator.fit(frame)
    alone = _copy(model)  # batches hold all rows: the order does not count
    optimizer = torch.optim.SGD(alone.parameters(), 0.001)
    x, one = torch.from_numpy(np.stack([row[0] for row in rows])), torch.tensor([[float(row[1])] for row in rows])
    two = torch.tensor([row[2] for row in rows], dtype=torch.float64)
    for epoch in range(3):
        first, second = alone(x.reshape(-1, 2, 2))
        loss = 0.25 * (first - one).square().mean() + 0.75 * (second - two).abs().mean()
        found = fitted.getHistory()[epoch]["train"]
        np.testing.assert_allclose([found["loss"], found["one_mae"]], [loss.item(), mae(first, one).item()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_same(weights_of(fitted.getModel()), weights_of(alone))
    pixels = session.createDataFrame([([*x.tolist()], a, b) for x, a, b in rows], ["pixels", "one", "two"])
    out = sorted(fitted.setOutputCols(["p", "q"]).transform(pixels).collect(), key=lambda row: row.pixels[0])
    first, second = (output.detach().numpy() for output in alone(x.reshape(-1, 2, 2)))
    np.testing.assert_allclose([[row.p, *row.q] for row in out], np.hstack([first, second]), rtol=1e-9)


def _copy(model: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(model))


def test_keras_ranks_train_as_one_process_does(df: Any, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    from horovod.keras.callbacks import BestModelCheckpoint
    from horovod.spark.keras import KerasEstimator, KerasModel

    class Doubled(keras.layers.Layer):
        def call(self, value: Any) -> Any:
            return 2 * value

    keras.utils.set_random_seed(1)
    inputs = [keras.Input((3, 1)), keras.Input((2,))]
    joined = keras.layers.Concatenate()([keras.layers.Dense(4, "tanh")(keras.layers.Flatten()(inputs[0])), inputs[1]])
    model = keras.Model(inputs, Doubled()(keras.layers.Dense(1)(joined)))
    before = model.get_weights()
    store = Store.create(str(tmp_path))
    train, _ = write(df, store, None, df.columns, "held", 3, 6)
    options: dict[str, Any] = {
        "store": store, "model": model, "optimizer": keras.optimizers.Adam(0.05),
        "loss": keras.losses.MeanSquaredError(),
        "feature_cols": ["features", "extra"], "label_cols": ["label"], "sample_weight_col": "weight",
        "batch_size": BATCH, "epochs": EPOCHS, "validation": "held", "metrics": ["mae"], "random_seed": 3, "verbose": 0,
        "backend": Processes(), "custom_objects": {"Doubled": Doubled}, "run_id": "whole",
    }  # fmt: skip
    # The callback takes the model with the highest loss, which is that of the first epoch.
    highest = {"checkpoint_callback": BestModelCheckpoint("val_loss", mode="max")}
    best = KerasEstimator(**options | highest).fit_on_parquet()
    first = KerasEstimator(**options | {"run_id": "parts", "epochs": 1}).fit_on_parquet()
    assert_same(best.getModel().get_weights(), first.getModel().get_weights(), rtol=1e-6)
    KerasEstimator(**options | {"run_id": "parts"}).save(str(tmp_path / "estimator"))
    fitted = KerasEstimator.load(str(tmp_path / "estimator")).setBackend(Processes()).fit_on_parquet()
    history = fitted.getHistory()
    assert history["val_loss"][0] > history["val_loss"][1]
    for name, values in best.getHistory().items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)
    for mine, same in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, same)

    alone = keras.models.clone_model(model)
    alone.set_weights(before)
    alone.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    readers = [reader_of(store, train, rank, shuffles=True, seed=3) for rank in range(2)]
    for epoch in range(EPOCHS):
        for one, two in zip(*(reader.batches(epoch) for reader in readers), strict=True):
            both = {name: np.concatenate([one[name], two[name]]) for name in one}
            # A rank's mean has the weight of the rank, though its last batch may be smaller.
            share = [len(both["label"]) / 2 / len(part["label"]) for part in (one, two)]
            weights = both["weight"] * np.repeat(share, [len(one["label"]), len(two["label"])])
            alone.train_on_batch([both["features"], both["extra"]], both["label"], weights)
    assert_same(fitted.getModel().get_weights(), alone.get_weights(), rtol=2e-4)
    columns = columns_of(df)
    outputs = alone.predict_on_batch([columns["features"], columns["extra"]])[:, 0]
    found = sorted(fitted.transform(df).collect(), key=lambda row: row.weight)
    np.testing.assert_allclose([row["label__output"] for row in found], outputs, rtol=1e-3, atol=1e-4)
    lengths = {name: len(values) for name, values in history.items()}
    assert lengths == dict.fromkeys(["loss", "mae", "val_loss", "val_mae"], EPOCHS)
    held = np.abs(outputs - columns["label"])[columns["held"]]
    np.testing.assert_allclose(history["val_mae"][-1], held.mean(), rtol=1e-3)
    fitted.save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"))
    assert_same(loaded.getModel().get_weights(), fitted.getModel().get_weights(), rtol=1e-6)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_ranks_train_as_one_process_does(df: Any, tmp_path: Path, package: str) -> None:
    lightning = pytest.importorskip(package)
    import torch

    from horovod.spark.lightning import TorchEstimator, TorchModel

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, kept: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()

        def forward(self, features: Any, extra: Any) -> Any:
            return self.net(features, extra)

        def training_step(self, batch: Any, index: int) -> Any:
            assert batch["flag"].dtype == torch.int64
            loss = (self(batch["features"], batch["extra"])[:, 0] - batch["label"]).square().mean()
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            error = self(batch["features"], batch["extra"])[:, 0] - batch["label"]
            self.log("val_mae", error.abs().mean(), sync_dist=True, batch_size=len(error))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.05)

    store = Store.create(str(tmp_path))
    train, _ = write(df, store, None, df.columns, "held", 3, 6)
    options: dict[str, Any] = {
        "store": store, "model": Module(Path), "feature_cols": ["features", "extra"], "label_cols": ["label", "flag"],
        "batch_size": BATCH, "epochs": EPOCHS, "validation": "held", "random_seed": 3, "verbose": 0,
        "backend": Processes(), "run_id": "whole", "terminate_on_nan": True,
    }  # fmt: skip
    with pytest.raises(RequestError, match=rf"callbacks must be instances of {package}.*Callback; received 3"):
        TorchEstimator(**options, callbacks=[3]).fit_on_parquet()
    with pytest.raises(RequestError, match=r"model must be a LightningModule.*Received: Net"):
        TorchEstimator(**options | {"model": net()}).fit_on_parquet()
    stops = lightning.callbacks.EarlyStopping("val_mae", patience=1, min_delta=1e9)  # after two epochs
    assert EPOCHS == 2
    fitted = TorchEstimator(**options | {"epochs": 9, "trainer_args": {"callbacks": stops}}).fit_on_parquet()
    readers = [reader_of(store, train, rank, shuffles=True, seed=3) for rank in range(2)]
    batches = [step for epoch in range(EPOCHS) for step in zip(*(r.batches(epoch) for r in readers), strict=True)]
    alone = torch_alone(batches, False, 1)
    assert_same(weights_of(fitted.getModel().net), weights_of(alone))
    TorchEstimator(**options | {"run_id": "parts", "epochs": 1}).fit_on_parquet()
    resumed = TorchEstimator(**options | {"run_id": "parts"}).fit_on_parquet()
    assert_same(weights_of(resumed.getModel().net), weights_of(alone))
    assert resumed.getHistory() == fitted.getHistory()
    assert [record["epoch"] for record in fitted.getHistory()] == [0, 1]
    assert {"loss", "val_mae"} < fitted.getHistory()[0].keys()
    fitted.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model")).setLabelColumns(["label"]).setOutputCols(["p"])
    columns = columns_of(df)
    outputs = alone(torch.from_numpy(columns["features"]), torch.from_numpy(columns["extra"])).detach().numpy()[:, 0]
    found = sorted(loaded.transform(df).collect(), key=lambda row: row.weight)
    np.testing.assert_allclose([row.p for row in found], outputs, rtol=1e-9)


def test_columns_of_arrow() -> None:
    import pyarrow as pa

    nested = to_numpy(pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[0, 0], [0, 1]]])[1:], "a")
    np.testing.assert_array_equal(nested, [[[5, 6], [7, 8]], [[0, 0], [0, 1]]])
    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
    sparse = {"type": 0, "size": 3, "indices": [2], "values": [5.0]}
    empty = {"type": 0, "size": 3, "indices": [], "values": []}
    vectors = pa.array([dense, sparse, dense, empty, sparse], kind)[1:]
    np.testing.assert_array_equal(to_numpy(vectors, "v"), [[0, 0, 5], [1, 2, 3], [0, 0, 0], [0, 0, 5]])
    with pytest.raises(RequestError, match="column 'a' has arrays of different lengths: 1, 2"):
        to_numpy(pa.array([[1], [1, 2]]), "a")
    with pytest.raises(RequestError, match="column 'a' has missing values in 1 of 2 rows"):
        to_numpy(pa.array([1, None]), "a")


def _refused(estimator: Any, df: Any, match: str) -> None:
    with pytest.raises((RequestError, TypeError), match=match):
        estimator.fit(df)


def test_errors_come_before_ranks_start(df: Any, tmp_path: Path) -> None:
    import torch

    store = Store.create(str(tmp_path))
    _refused(torch_estimator(store, feature_cols=["nothing"]), df, "no column nothing")
    _refused(torch_estimator(store, optimizer=torch.optim.SGD(net().parameters(), 0.1)), df, "model lacks")
    _refused(torch_estimator(store, continuous_cols=["label"]), df, "does not support continuous_cols")
    _refused(torch_estimator(store, backend=Processes(), num_proc=2), df, "exclude each other")
    _refused(torch_estimator(store, loss=lambda x, y: x, sample_weight_col="weight"), df, "no argument reduction")
    _refused(torch_estimator(store, backend=Processes(), validation=1e-9), df, "no rows for validation")
    text = df.selectExpr("*", "'a' as text")
    for wrong in ({"feature_cols": ["text"]}, {"validation": "text"}):
        _refused(torch_estimator(store, backend=Processes(), **wrong), text, "Received: text of string")
    _refused(torch_estimator(store, optimizer="adam"), df, "Received: 'adam'")
    _refused(torch_estimator(store, num_proc=0), df, "num_proc must be 1 or more")
    _refused(torch_estimator(store, random_seed=-1), df, "random_seed must be 0 or more")
    for name, one in {"loss_weights": 1.0, "label_shapes": [-1], "input_shapes": [-1]}.items():
        _refused(torch_estimator(store, **{name: [one] * 3}), df, f"{name} has 3 entries, and")
    with pytest.raises(TypeError, match="expected a Store"):
        torch_estimator(str(tmp_path))
    with pytest.raises(RequestError, match="meant is probably batch_size"):
        torch_estimator(store, batchsize=3)
    with pytest.raises(RequestError, match="no Parquet files"):
        torch_estimator(store, backend=Processes()).fit_on_parquet()
    for name, value in {"epochs": "many", "callbacks": print}.items():
        with pytest.raises(TypeError, match=name):
            torch_estimator(store, **{name: value})


def test_stores(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    assert isinstance(store, LocalStore)
    assert store.get_train_data_path() == f"{tmp_path}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{tmp_path}/intermediate_val_data.3"
    assert store.get_checkpoint_path("r") == f"{tmp_path}/runs/r/checkpoint"
    assert not store.is_parquet_dataset(store.get_train_data_path())
    store.write_text(f"{tmp_path}/runs/r/note", "text")
    assert (store.read(f"{tmp_path}/runs/r/note"), store.exists(f"{tmp_path}/no")) == (b"text", False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("1")
    store.to_remote("r").sync(str(tmp_path / "logs"))
    assert (tmp_path / "runs" / "r" / "events").read_text() == "1"
    memory = Store.create("memory://folder")
    memory.write_text(memory.get_logs_path("r") + "/a", json.dumps(1))
    assert memory.read(memory.get_logs_path("r") + "/a") == b"1"
    memory.delete("memory://folder")
    assert Store.create("dbfs:/some/folder").prefix_path == "/dbfs/some/folder"
    assert isinstance(Store.create("/dbfs/some/folder"), DBFSLocalStore)
    with pytest.raises(RequestError, match="no file system for the store 'hdfs://name:8020/folder'"):
        HDFSStore("hdfs://name:8020/folder")
    with pytest.raises(RequestError, match="no file system for the store 'nothing://folder'"):
        Store.create("nothing://folder")
    for url in (f"file:{tmp_path}", "hdfs:/folder", Path("s3://bucket/folder")):
        with pytest.raises(RequestError, match="with its host or three slashes"):
            Store.create(url)  # type: ignore[arg-type]
    assert SparkBackend(num_proc=3).num_processes() == 3
