"""PopDistStrategy and Keras: every sample of an instance's shard is used once per epoch, in whole batches."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks


def _seen(keras_name: str, rows: int, local: int, kind: str) -> dict[str, list[Any]]:
    """Train, evaluate and predict with the SDK's recipe; return the samples of each, and what Keras reports."""
    import numpy as np
    import tensorflow as tf

    import popdist
    from khorovod_ipu.tensorflow import software
    from khorovod_ipu.tensorflow.strategies import PopDistStrategy

    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    places = {"NUM_TOTAL_REPLICAS": size * local, "NUM_LOCAL_REPLICAS": local, "REPLICA_INDEX_OFFSET": rank * local}
    os.environ.update({f"POPDIST_{name}": str(value) for name, value in places.items()})
    keras = importlib.import_module(keras_name)
    try:
        software.prepare()
        strategy, batches = PopDistStrategy(), []

        class Model(keras.Model):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

            def call(self, x: Any) -> Any:
                tf.numpy_function(lambda batch: batches.append(batch.ravel().tolist()), [x], [], stateful=True)
                return self.layer(x)

        values = np.arange(1, rows + 1, dtype="float32")[:, None]
        data = tf.data.Dataset.from_tensor_slices((values, 0 * values))
        data = data.shard(popdist.getNumInstances(), popdist.getInstanceIndex())
        data = data.batch(4, drop_remainder=kind == "whole")
        if kind == "unknown":
            data = data.filter(lambda *_: True)
        with strategy.scope():
            model = Model()
            model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])

        def taken() -> list[list[float]]:
            found = [batch for batch in batches if batch]
            batches.clear()
            return found

        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        found: dict[str, list[Any]] = {"fit": taken(), "loss": history["loss"], "mae": history["mae"]}
        found["evaluated"] = model.evaluate(data, verbose=0)
        found["evaluate"] = taken()
        found["predicted"] = model.predict(data, verbose=0).ravel().tolist()
        found["predict"] = taken()
        with strategy.scope():
            x = keras.layers.Input((1,))
            pair = keras.Model(
                x, [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(x) for _ in range(2)]
            )
            pair.compile(keras.optimizers.SGD(0.0), ["mse", "mae"])
            normalized = keras.Sequential([keras.layers.Input((1,)), keras.layers.BatchNormalization()])
            normalized.compile(keras.optimizers.SGD(0.0), "mse")
        normalized.fit(data, verbose=0)
        found["finite"] = [bool(np.isfinite(value).all()) for value in normalized.get_weights()]
        found["of two outputs"] = pair.evaluate(data.map(lambda x, y: (x, (y, y))), verbose=0)
        own = values[popdist.getInstanceIndex() :: popdist.getNumInstances()]
        with tempfile.TemporaryDirectory() as folder:
            saving = keras.callbacks.ModelCheckpoint(f"{folder}/saved.weights.h5", save_weights_only=True)
            history = model.fit(
                own, 0 * own, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[saving]
            ).history
            found["saved"] = [file.name for file in Path(folder).iterdir()]
        found["array"], found["loss of array"] = taken(), history["loss"]

        class Batches(keras.utils.Sequence):  # type: ignore[misc,name-defined]
            def __len__(self) -> int:
                return -(-len(own) // 4)

            def __getitem__(self, number: int) -> Any:
                x = own[number * 4 : number * 4 + 4]
                return x, 0 * x

        class Steps(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                found.setdefault("loss of steps", []).append(logs["loss"])

        history = model.fit(Batches(), epochs=2, shuffle=False, verbose=0, callbacks=[Steps()]).history
        found["sequence"], found["loss of sequence"] = taken(), history["loss"]

        for use, arguments in (("train", (own, 0 * own)), ("test", (own, 0 * own)), ("predict", (own,))):
            try:
                found[f"{use}_on_batch"] = np.ravel(getattr(model, f"{use}_on_batch")(*arguments)).tolist()
            except ValueError as error:
                found[f"{use}_on_batch"] = [str(error)]
        batches.clear()

        for batch in strategy.distribute_datasets_from_function(lambda _: data):
            strategy.run(tf.function(lambda x, y: model(x)), batch)
        found["loop"] = taken()
        return found
    finally:
        popdist.finalizeBackend()
        for name in [name for name in os.environ if name.startswith("POPDIST_")]:
            del os.environ[name]


@pytest.mark.slow
@pytest.mark.parametrize("keras", ["tf_keras", "keras"])
@pytest.mark.parametrize(
    ("size", "local", "rows", "kind"),
    [(2, 1, 41, "rest"), (1, 3, 9, "rest"), (1, 3, 20, "whole"), (2, 2, 37, "unknown")],
)
def test_every_sample_is_used_once(keras: str, size: int, local: int, rows: int, kind: str) -> None:
    values = [float(value) for value in range(1, rows + 1)]
    losses = [sum(value * value for value in values) / rows, sum(values) / rows]
    results = run_ranks(size, _seen, keras, rows, local, kind, framework="keras-tensorflow")
    for rank, found in enumerate(results):
        own = values[rank::size]
        batches = [own[start : start + 4] for start in range(0, len(own), 4)]
        assert sorted(found["fit"]) == sorted(2 * batches)
        for use in ("evaluate", "predict", "loop"):
            assert sorted(found[use]) == batches, use
        assert found["predicted"] == own
        assert found["saved"] == ["saved.weights.h5"] * (rank == 0 or keras == "keras")
        for data in ("array", "sequence"):
            assert sorted(found[data]) == sorted(2 * batches), data
            assert found[f"loss of {data}"] == pytest.approx(2 * losses[:1])
        assert found["loss of steps"] == results[0]["loss of steps"]
        for use, expected in (("train", losses), ("test", losses), ("predict", own)):
            seen = found[f"{use}_on_batch"]
            if local == 1:
                assert seen == pytest.approx(expected), use
            else:
                assert seen[0].startswith(f"{use}_on_batch takes one batch, and each of the {local} replicas"), use
        assert found["loss"] == pytest.approx(2 * losses[:1])
        assert found["mae"] == pytest.approx(2 * losses[1:])
        assert found["evaluated"] == pytest.approx(losses)
        assert found["finite"] == [True] * 4
        assert found["of two outputs"] == pytest.approx([sum(losses), *losses])
