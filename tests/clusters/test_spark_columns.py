"""Columns with which Spark's estimators train, and rows that they keep."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from spark_fits import MARKS, Processes, df, session, torch_estimator

# isort: split
import pyarrow as pa
from pyarrow import parquet
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler

from horovod.errors import LaunchError, RequestError
from horovod.spark.common.columns import from_pandas
from horovod.spark.common.reading import ParquetTable, Reader
from horovod.spark.common.store import Store
from horovod.spark.common.writing import write

pytestmark = MARKS

__all__ = ["df", "session"]  # fixtures


def test_columns_of_pandas() -> None:
    import pandas

    nested = np.empty(2, object)
    nested[:] = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    frame = pandas.DataFrame({
        "nested": [nested, nested],
        "decimal": [Decimal("0.5"), Decimal(2)],
        "decimals": [np.array([Decimal(1), Decimal(2)]), np.array([Decimal(3), Decimal(4)])],
        "gaps": [Decimal(1), None],
        "text": ["1", "2"],
    })  # fmt: skip
    found = from_pandas(frame)
    np.testing.assert_array_equal(found["nested"], [[[1.0, 2.0], [3.0, 4.0]]] * 2)
    np.testing.assert_array_equal(found["decimal"], [0.5, 2.0])
    np.testing.assert_array_equal(found["decimals"], [[1.0, 2.0], [3.0, 4.0]])
    assert [found[name].dtype.kind for name in frame.columns] == ["f", "f", "f", "O", "U"]
    nested[1] = np.array([3.0])
    with pytest.raises(RequestError, match=r"column 'nested' has arrays of different shapes: \[\(1,\), \(2,\)\]"):
        from_pandas(frame)


def test_a_resumed_run_without_a_seed_has_the_same_rows_for_validation(df: Any, tmp_path: Path) -> None:
    class Stops(Processes):
        def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
            (job,) = args
            (batch,) = Reader(job.val, job.store, ["label"], 0, 1, 99).batches(0)
            seen.append((job.seed, sorted(batch["label"])))
            raise InterruptedError

    seen: list[Any] = []
    for run_id in ("one", "one", "two"):
        options = {"run_id": run_id, "random_seed": None, "validation": 0.5, "backend": Stops()}
        with pytest.raises(InterruptedError):
            torch_estimator(Store.create(str(tmp_path)), **options).fit(df)
    assert seen[0] == seen[1] and seen[1][0] != seen[2][0] and seen[1][1] != seen[2][1]


@pytest.mark.parametrize("held", [0.3, "x"], ids=["share", "column"])
def test_rows_keep_their_order_and_side_however_a_shuffle_returns_them(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Any
) -> None:
    """Executors answer in any order."""
    columns = ["x", "pair", "more"]
    rows = session.range(40).selectExpr("cast(id as double) - 9 as x", "array(id, 1) as pair", "map('id', id) as more")
    store, found = Store.create(str(tmp_path)), []
    repartition = type(rows).repartition
    for ascending in (True, False):
        monkeypatch.setattr(
            type(rows),
            "repartition",
            lambda *args, up=ascending: repartition(*args).sortWithinPartitions("c0", ascending=up),
        )
        tables = write(rows, store, str(ascending), columns, held, 7, 2)
        found.append([[parquet.read_table(path)["x"].to_pylist() for path in table.files] for table in tables if table])
    assert found[0] == found[1] and [len(files) for files in found[0]] == [2, 2]
    assert sorted(x + 9 for files in found[0] for file in files for x in file) == list(range(40))


def test_a_resumed_run_of_torch_does_not_repeat_its_random_choices(df: Any, tmp_path: Path) -> None:
    import torch

    def draw(output: Any, label: Any) -> Any:
        return torch.rand(())

    for epochs in (1, 2):
        how = {"backend": Processes(), "run_id": "one", "epochs": epochs, "metrics": [draw]}
        trained = torch_estimator(Store.create(str(tmp_path)), **how).fit(df)
    first, second = (record["train"]["draw"] for record in trained.getHistory())
    assert first != second


def test_copies_that_spark_trains_share_no_run(df: Any, tmp_path: Path) -> None:
    class Ranks(Processes):
        def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
            raise InterruptedError

    def pipeline(**how: Any) -> Any:
        estimator = torch_estimator(Store.create(str(tmp_path)), backend=Ranks(), **how)
        return Pipeline(stages=[VectorAssembler(inputCols=["label"], outputCol="more"), estimator])

    with pytest.raises(InterruptedError):
        pipeline(run_id="one").fit(df)
    with pytest.raises(InterruptedError):
        pipeline().copy().fit(df)  # as CrossValidator does for each fold
    with pytest.raises(RequestError, match=r"run_id='one' names the run of one model.* Leave run_id out in Cross"):
        pipeline(run_id="one").copy().fit(df)
    assert list(tmp_path.rglob("*.fit")) == []


def test_a_run_is_trained_once_at_a_time(df: Any, tmp_path: Path) -> None:
    class Ranks(Processes):
        def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
            with pytest.raises(RequestError, match="another thread trains the run 'one' now"):
                estimator.fit(df)
            with pytest.raises(RequestError, match="another thread trains the run 'one' now"):
                estimator.fit_on_parquet()
            assert len(list(tmp_path.rglob("*.parquet"))) > 1, "the files of this run are still there"
            raise InterruptedError

    estimator = torch_estimator(Store.create(str(tmp_path)), backend=Ranks(), run_id="one")
    write(df, estimator.getStore(), None, ["features", "extra", "label", "held"], "held", 0, 2)
    for _ in range(2):  # the run may be trained again afterwards
        with pytest.raises(InterruptedError):
            estimator.fit(df)


@pytest.mark.parametrize("mark", [".", "`"])
def test_a_column_may_have_a_dot_or_a_backtick_in_its_name(mark: str, session: Any, tmp_path: Path) -> None:
    rows = session.range(9).selectExpr("id", "struct(-1 as b) as a", "id % 3")
    rows = rows.toDF(first := f"a{mark}b", "a", second := f"c{mark}d")
    store = Store.create(str(tmp_path))
    train, val = write(rows, store, None, [first], second, 0, 1)
    assert val is not None and (train.rows, val.rows) == (3, 6)
    (batch,) = Reader(train, store, [first], 0, 1, 9).batches(0)
    assert sorted(batch[first]) == [0, 3, 6]


def test_a_keras_metric_may_have_a_value_for_each_class(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    from horovod.spark.keras.training import _Progress

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])
    model.compile(loss="mse", metrics=[keras.metrics.F1Score()])
    training: Any = SimpleNamespace(history=None, save=lambda *_: None)
    data: Any = SimpleNamespace()
    progress = _Progress(training, data, tmp_path / "best.weights.h5")
    model.fit(np.eye(2), np.eye(2), epochs=3, verbose=0, callbacks=[progress])
    history = json.loads(json.dumps(progress.history))
    assert (np.shape(history["f1_score"]), np.shape(history["loss"])) == ((3, 2), (3,))


def test_a_keras_model_may_return_a_dict() -> None:
    keras = pytest.importorskip("keras")
    from horovod.spark.keras import KerasModel

    inputs = keras.Input((2,))
    model = keras.Model(inputs, {"sum": keras.ops.sum(inputs, 1), "double": 2 * inputs})
    double, total = KerasModel._predictor({"model": model})([np.eye(2)])  # in the order of model.outputs
    np.testing.assert_array_equal(double, 2 * np.eye(2))
    np.testing.assert_array_equal(total, [1, 1])


def test_a_resumed_run_of_keras_has_the_gradients_of_all_ranks_in_an_unfinished_step(df: Any, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    from horovod.spark.keras import KerasEstimator

    store = Store.create(str(tmp_path))
    train, _ = write(df, store, None, ["extra", "label"], None, 3, 6)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def fit(run_id: str, epochs: int) -> Any:
        return KerasEstimator(
            store=store, model=model, optimizer=keras.optimizers.SGD(0.02), loss="mse", feature_cols=["extra"],
            label_cols=["label"], batch_size=5, epochs=epochs, backward_passes_per_step=2, random_seed=3,
            backend=Processes(), run_id=run_id, verbose=0,
        ).fit_on_parquet().getModel()  # fmt: skip

    steps = Reader(train, store, ["label"], 0, 2, 5).steps
    assert steps % 2 == 1
    fit("parts", 1)
    for mine, other in zip(fit("parts", 2).get_weights(), fit("whole", 2).get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


@pytest.mark.parametrize("keeps", ["best", "average"])
def test_a_known_run_of_keras_returns_the_best_model_or_the_average_of_all_its_epochs(
    df: Any, tmp_path: Path, keeps: str
) -> None:
    keras = pytest.importorskip("keras")
    import horovod.keras as hvd
    from horovod.spark.keras import KerasEstimator

    store = Store.create(str(tmp_path))
    write(df, store, None, ["extra", "label"], None, 3, 6)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def fit(epochs: int) -> Any:
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss", mode="max") if keeps == "best" else None
        return KerasEstimator(
            store=store, model=model, optimizer=keras.optimizers.SGD(0.02, use_ema=keeps == "average"), loss="mse",
            feature_cols=["extra"], label_cols=["label"], epochs=epochs, random_seed=3, backend=Processes(),
            run_id="run", verbose=0, checkpoint_callback=best,
        ).fit_on_parquet()  # fmt: skip

    first = fit(1).getModel().get_weights()
    if keeps == "best":
        resumed = fit(3)
        loss = resumed.getHistory()["loss"]
        assert max(loss) == loss[0]
    else:
        with pytest.warns(UserWarning, match="nothing was trained"):
            resumed = fit(1)
    for mine, other in zip(resumed.getModel().get_weights(), first, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_resumed_run_of_lightning_lowers_the_rate_on_a_plateau_as_the_whole_one_does(df: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    import torch

    from horovod.spark.lightning import TorchEstimator

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1).double()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = (self.net(batch["extra"])[:, 0] - batch["label"]).square().mean()
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.01)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}

    store, model = Store.create(str(tmp_path)), Module()
    write(df, store, None, ["extra", "label"], None, 3, 6)

    def fit(run_id: str, epochs: int) -> Any:
        return TorchEstimator(
            store=store, model=model, feature_cols=["extra"], label_cols=["label"], batch_size=4, epochs=epochs,
            random_seed=3, backend=Processes(), run_id=run_id, verbose=0,
        ).fit_on_parquet()  # fmt: skip

    for epochs in (2, 3):
        parts = fit("parts", epochs)
    assert parts.getHistory() == fit("whole", 3).getHistory()


def test_what_cannot_run_is_told_before_the_data_frame_is_computed(df: Any, tmp_path: Path) -> None:
    rows = df.selectExpr("features", "extra", "cast(raise_error('computed') as double) as label", "held")
    with pytest.raises(LaunchError, match=r"num_proc=3, and the Spark application has 2 slots \(local\[2\]"):
        torch_estimator(Store.create(str(tmp_path)), num_proc=3).fit(rows)
    loss = functools.partial(print, threading.Lock())
    with pytest.raises(RequestError, match=r"cannot send loss=functools.* to the ranks: cannot pickle '_thread.lock'"):
        torch_estimator(Store.create(str(tmp_path)), num_proc=2, loss=loss).fit(rows)


@pytest.mark.parametrize("kind", ["array(id)", "features"])
def test_arrays_and_vectors_choose_no_rows_for_validation(df: Any, tmp_path: Path, kind: str) -> None:
    frame = df.selectExpr("*", "weight as id").selectExpr("features", "extra", "label", f"{kind} as held")
    match = "column of validation must hold numbers or booleans. Received: held of (array|vector)"
    with pytest.raises(RequestError, match=match):
        torch_estimator(Store.create(str(tmp_path)), backend=Processes()).fit(frame)


def test_only_the_store_turns_checkpoints_off(df: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from horovod.spark.lightning import TorchEstimator

    estimator = TorchEstimator(
        store=Store.create(str(tmp_path)), model=lightning.LightningModule(), feature_cols=["extra"],
        label_cols=["label"], trainer_args={"enable_checkpointing": False},
    )  # fmt: skip
    with pytest.raises(RequestError, match="enable_checkpointing=False: give Store save_runs=False"):
        estimator.fit(df)


@pytest.mark.parametrize("run_id", ["p/../q", "..", "."])
def test_a_run_is_one_folder_of_the_store(df: Any, tmp_path: Path, run_id: str) -> None:
    estimator = torch_estimator(Store.create(str(tmp_path)), backend=Processes(), run_id=run_id)
    with pytest.raises(RequestError, match=f"run_id names a folder .* Received: '{run_id}'"):
        estimator.fit(df)


@pytest.mark.parametrize("shuffles", [False, True], ids=["in-order", "shuffled"])
def test_rows_that_stay_in_memory_are_read_once(tmp_path: Path, shuffles: bool) -> None:
    parquet.write_table(pa.table({"x": list(range(9))}), tmp_path / "rows")
    table = ParquetTable((f"{tmp_path}/rows",), ((9,),))
    reader = Reader(table, Store.create(str(tmp_path)), ["x"], 0, 1, 3, shuffles=shuffles, buffer_rows=4, keeps=True)
    for _ in range(2):  # as in an epoch, which never asks for the end of a pass
        batches = list(itertools.islice(reader.stream(), reader.steps))
        found = np.concatenate([batch["x"] for batch in batches]).tolist()
        assert sorted(found) == list(range(9)) and (found != sorted(found)) == shuffles
        (tmp_path / "rows").unlink(missing_ok=True)


@pytest.mark.parametrize("batch_size", [2, 4])
def test_arrays_of_other_parts_of_the_rows_have_the_same_length(tmp_path: Path, batch_size: int) -> None:
    with parquet.ParquetWriter(tmp_path / "rows", pa.schema({"x": pa.list_(pa.float64())})) as writer:
        for width in (3, 2):
            writer.write_table(pa.table({"x": [[1.0] * width] * 2}))
    table = ParquetTable((f"{tmp_path}/rows",), ((2, 2),))
    reader = Reader(table, Store.create(str(tmp_path)), ["x"], 0, 1, batch_size)
    with pytest.raises(RequestError, match=r"column 'x' has arrays of different shapes: \[\(2,\), \(3,\)\]. Pad them"):
        list(itertools.islice(reader.stream(), reader.steps))


def test_a_store_that_a_rank_does_not_share_is_named(tmp_path: Path) -> None:
    reader = Reader(ParquetTable(("/rows",), ((9,),)), Store.create("memory://folder"), ["x"], 1, 2, 3)
    with pytest.raises(RequestError, match=r"store memory://folder is not there for rank 1: /rows\n.* share the store"):
        next(reader.batches(0))
