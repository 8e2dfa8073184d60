"""Predictions on Spark's DataFrames, and the columns that `fit` and `transform` refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spark_fits import MARKS, Processes, session, torch_estimator

# isort: split
import pyarrow as pa

from horovod.errors import RequestError
from horovod.spark.common.store import Store

pytestmark = MARKS

__all__ = ["session"]  # fixture


@pytest.mark.parametrize("knows_shapes", [True, False], ids=["trained", "made"])
def test_models_predict_on_all_types_that_estimators_take(session: Any, knows_shapes: bool) -> None:
    import torch

    from horovod.spark.torch import TorchModel

    class Sum(torch.nn.Module):
        """Adds all numbers of a row."""

        def forward(self, *features: Any) -> Any:
            return sum(feature.reshape(len(feature), -1).sum(1) for feature in features)

    rows = session.range(1, 4).selectExpr(
        "cast(id as decimal(10, 2)) as x", "array(x, x) as pair", "array(array(id, 1.5D), array(id, id)) as nested"
    )
    shapes = [[], [2], [2, 2]] if knows_shapes else None
    names = ["x", "pair", "nested"]
    model = TorchModel(model=Sum(), feature_columns=names, label_columns=["y"], row_shapes=shapes, batch_size=2)
    assert [row["y__output"] for row in model.transform(rows).collect()] == [7.5, 13.5, 19.5]
    twice = model.copy({model.feature_columns: ["x", "x"], model.row_shapes: [[], []] if knows_shapes else None})
    assert [row["y__output"] for row in twice.transform(rows).collect()] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("knows_shapes", [True, False], ids=["trained", "made"])
def test_a_lightning_module_gets_whole_numbers_as_in_training(session: Any, knows_shapes: bool) -> None:
    lightning = pytest.importorskip("lightning")
    import torch

    from horovod.spark.lightning import TorchModel

    class Ids(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Embedding.from_pretrained(torch.tensor([[1.0], [2.0], [3.0]]))

        def forward(self, ids: Any, pair: Any, flag: Any, x: Any) -> Any:
            assert [each.dtype for each in (flag, x)] == [torch.bool, torch.float32]
            return self.weights(ids % 3)[:, 0] + self.weights(pair).sum((1, 2)) + flag + x

    rows = session.range(2).selectExpr(
        "id + bigint(1e12) as ids", "array(int(id), 2) as pair", "id = 1 as flag", "0.25D as x"
    )
    shapes = [[], [2], [], []] if knows_shapes else None
    model = TorchModel(model=Ids(), feature_columns=rows.columns, label_columns=["y"], row_shapes=shapes)
    assert 10**12 % 3 == 1
    assert sorted(row["y__output"] for row in model.transform(rows).collect()) == [2 + 4 + 0.25, 3 + 5 + 1 + 0.25]


@pytest.mark.parametrize("classes", [1, 3])
def test_models_may_squeeze_their_outputs(session: Any, classes: int) -> None:
    """Also if Spark passes a single row, or a single one is left for the last batch."""
    import torch

    from horovod.spark.torch import TorchModel

    class Squeezed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, classes)

        def forward(self, pair: Any) -> Any:
            return self.layer(pair).squeeze()

    net = Squeezed().double()
    model = TorchModel(model=net, feature_columns=["pair"], label_columns=["y"], row_shapes=[[2]], batch_size=2)
    for count in (1, 5):
        rows = session.range(count).coalesce(1).selectExpr("array(id, 1D) as pair")
        found = [np.ravel(row["y__output"]) for row in model.transform(rows).collect()]
        pairs = torch.tensor([[float(number), 1.0] for number in range(count)]).double()
        np.testing.assert_allclose(found, net.layer(pairs).detach().numpy(), rtol=1e-12)
    flat = model.copy({model.model: torch.nn.Flatten(0)})
    with pytest.raises(RequestError, match=r"a row for each row that it gets: for 2 rows .* shape \(4,\)"):
        flat.transform(rows)


def test_models_may_write_into_their_inputs() -> None:
    import torch

    from horovod.spark.torch.tensors import tensors

    column = pa.array([1.0, 2.0]).to_numpy()  # read-only, as in transform()
    (made,) = tensors([column], ["x"], torch.float64, torch.device("cpu"))
    assert made.add_(1).tolist() == [2.0, 3.0] and column.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("gap", ["x", "pair", "features"])
def test_fit_and_transform_refuse_missing_values(session: Any, tmp_path: Path, gap: str) -> None:
    import torch
    from pyspark.errors import PySparkException
    from pyspark.ml.linalg import Vectors

    from horovod.spark.torch import TorchModel

    whole = {"x": 1.0, "pair": [1.0, 2.0], "features": Vectors.dense([1.0]), "y": 0.0}
    other = {**whole, gap: [None, 2.0] if gap == "pair" else None}
    rows = session.createDataFrame([tuple(whole.values()), tuple(other.values())], list(whole))
    match = f"column '{gap}' has missing values. Fill or drop them first"
    options = {"feature_cols": [gap], "label_cols": ["y"], "validation": 0.0, "backend": Processes()}
    with pytest.raises(PySparkException, match=match):
        torch_estimator(Store.create(str(tmp_path)), **options).fit(rows)
    shape = [2] if gap == "pair" else [1]
    model = TorchModel(model=torch.nn.Identity(), feature_columns=[gap], label_columns=[gap], row_shapes=[shape])
    with pytest.raises(PySparkException, match=match):
        model.transform(rows).collect()


def test_transform_refuses_a_column_of_another_width_than_in_training(session: Any) -> None:
    import torch
    from pyspark.errors import PySparkException

    from horovod.spark.torch import TorchModel

    rows = session.createDataFrame([([1.0, 2.0],)], ["pair"])
    model = TorchModel(model=torch.nn.Identity(), feature_columns=["pair"], label_columns=["pair"], row_shapes=[[1]])
    with pytest.raises(
        PySparkException, match=r"made 2 outputs from 1 rows. Does column pair .* trained with, \[\[1\]\]"
    ):
        model.transform(rows).collect()


@pytest.mark.parametrize("knows_shapes", [True, False], ids=["trained", "made"])
def test_fit_and_transform_name_the_columns_without_numbers(session: Any, tmp_path: Path, knows_shapes: bool) -> None:
    import torch
    from pyspark.ml.linalg import Vectors

    from horovod.spark.torch import TorchModel

    rows = session.createDataFrame([("a", [Vectors.dense([1.0])], 1.0)], ["text", "vectors", "y"])
    features = ["text", "vectors", "y"]
    match = "must hold numbers, booleans, .*Received: text of string, vectors of array<vector>$"
    with pytest.raises(RequestError, match=match):
        torch_estimator(Store.create(str(tmp_path)), feature_cols=features, label_cols=["y"], validation=0.0).fit(rows)
    shapes = [[], [1, 1], []] if knows_shapes else None
    model = TorchModel(model=torch.nn.Identity(), feature_columns=features, label_columns=["y"], row_shapes=shapes)
    with pytest.raises(RequestError, match=match):
        model.transform(rows)


def test_transform_refuses_one_column_for_two_outputs(session: Any) -> None:
    import torch

    from horovod.spark.torch import TorchModel

    class Two(torch.nn.Module):
        """As a network with an auxiliary output, which is trained on the same label."""

        def forward(self, x: Any) -> Any:
            return x, 2 * x

    rows = session.createDataFrame([(1.0,)], ["x"])
    model = TorchModel(model=Two(), feature_columns=["x"], label_columns=["y", "y"], row_shapes=[[]])
    with pytest.raises(RequestError, match="would share a column: y__output, y__output; give setOutputCols"):
        model.transform(rows)
    differ_in_case = model.copy().setOutputCols(["P", "p"])
    with pytest.raises(RequestError, match="would share a column: P, p; give setOutputCols"):
        differ_in_case.transform(rows)
    session.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert differ_in_case.transform(rows).columns == ["x", "P", "p"]
    finally:
        session.conf.unset("spark.sql.caseSensitive")
    assert [tuple(row) for row in model.setOutputCols(["a", "b"]).transform(rows).collect()] == [(1.0, 1.0, 2.0)]
