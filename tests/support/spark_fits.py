"""Marks, a DataFrame and models for tests of Spark's estimators, and ranks that are processes beside Spark.

Its import skips the tests of a file where Spark is missing, so import it before pyarrow and pyspark.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

pytest.importorskip("pyspark", reason="needs: pip install khorovod[spark]")
pytest.importorskip("pyarrow", reason="needs: pip install khorovod[spark]")
if shutil.which("java") is None and not os.environ.get("HOROVOD_TEST_CLUSTERS"):
    pytest.skip("needs Java 17: apt-get install openjdk-17-jre-headless", allow_module_level=True)

import fsspec.asyn

from horovod.spark.common.backend import Backend
from horovod.spark.common.reading import ParquetTable, Reader
from horovod.spark.common.store import Store

MARKS = [
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]
ROWS, BATCH, EPOCHS = 45, 4, 2
WEIGHTS = [1.0, 2.0, 3.0]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import this file


class Processes(Backend):
    """Two ranks in processes beside Spark."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        import horovod

        with pytest.MonkeyPatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            return horovod.run(fn, args, kwargs, num_proc=2)

    def num_processes(self) -> int:
        return 2


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master("local[2]").appName("estimators")
    settings = {
        "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2", "spark.ui.showConsoleProgress": "false",
    }  # fmt: skip
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    # The first job opens connections that Spark keeps; a test looks for files that it has left.
    assert spark.range(2).mapInArrow(lambda batches: batches, "id long").count() == 2
    fsspec.asyn.get_loop()  # the same for the thread of fsspec's asynchronous file systems
    yield spark
    spark.stop()


@pytest.fixture(scope="module")
def df(session: Any) -> Any:
    """Dense and sparse vectors, arrays, and numbers; each row has its own weight, by which a test knows it."""
    from pyspark.ml.linalg import Vectors

    draw = np.random.default_rng(0)
    rows = []
    for number in range(ROWS):
        values = draw.normal(size=3)
        label = float(values @ WEIGHTS + number % 2)
        vector = Vectors.sparse(3, {0: values[0], 2: values[2]}) if number % 3 == 0 else Vectors.dense(values)
        rows.append((vector, [float(number % 5), 1.0], number % 2, label, 1.0 + number, number % 4 == 0))
    schema = "features: vector, extra: array<double>, flag: int, label: double, weight: double, held: boolean"
    names = [part.split(":")[0] for part in schema.split(", ")]
    return session.createDataFrame(rows, names)


def columns_of(df: Any) -> dict[str, Any]:
    rows = sorted(df.collect(), key=lambda row: row.weight)
    made = {name: np.array([np.asarray(row[name], float) for row in rows]) for name in ("extra", "label", "weight")}
    return made | {
        "features": np.array([row.features.toArray() for row in rows]),
        "held": np.array([row.held for row in rows]),
        "flag": np.array([row.flag for row in rows]),
    }


def net() -> Any:
    import torch

    class Net(torch.nn.Module):
        """Two inputs, the second of them an array."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(6, 1)

        def forward(self, features: Any, extra: Any) -> Any:
            return self.last(torch.cat([torch.tanh(self.first(features)), extra], 1))

    torch.manual_seed(5)
    return Net().double()


def reader_of(store: Store, table: ParquetTable, rank: int, **more: Any) -> Reader:
    options: dict[str, Any] = {"batch_size": BATCH} | more
    return Reader(table, store, ["features", "extra", "flag", "label", "weight"], rank, 2, **options)


def torch_alone(batches: Any, weighted: bool, passes: int) -> Any:
    """One process that sees the batches of both ranks in each step."""
    import torch

    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    steps = len(batches) // EPOCHS
    for number, parts in enumerate(batches):
        for batch in parts:
            x, extra, y, w = (torch.from_numpy(batch[name]) for name in ("features", "extra", "label", "weight"))
            losses = (model(x, extra)[:, 0] - y).square()
            ((losses * w if weighted else losses).mean() / len(parts)).backward()
        step = number % steps + 1
        if step % passes == 0 or step == steps:
            optimizer.step()
            optimizer.zero_grad()
    return model


def mae(output: Any, label: Any) -> Any:
    return (output - label).abs().mean()


def torch_estimator(store: Store, **more: Any) -> Any:
    import torch

    from horovod.spark.torch import TorchEstimator

    model = net()
    return TorchEstimator(**({
        "store": store, "model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.05),
        "loss": torch.nn.functional.mse_loss, "feature_cols": ["features", "extra"], "label_cols": ["label"],
        "batch_size": BATCH, "epochs": EPOCHS, "validation": "held", "metrics": [mae], "random_seed": 3, "verbose": 0,
        "partitions_per_process": 3,
    } | more))  # fmt: skip


def weights_of(model: Any) -> list[Any]:
    return [value.numpy() for value in model.state_dict().values()]


def assert_same(found: Any, wanted: Any, rtol: float = 1e-9) -> None:
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=1e-9)
