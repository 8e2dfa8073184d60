"""Gradients that Keras has added up since its last update, when a rank is lost or joins."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from elastic_job import ElasticJob
from harness import on_ranks

from horovod.core.membership_events import Policy


def _counting(samples: int) -> Any:
    """Return a model with a weight for each sample, which counts how often it was used; an update has three passes."""
    import keras
    import numpy as np

    import horovod.keras as hvd

    model = keras.Sequential([keras.layers.Input((samples,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((samples, 1))])
    sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=3)
    model.compile(sgd, loss=keras.losses.Hinge(reduction="sum"))  # 1 - y_pred of each sample
    return model


def _fit_with_passes(samples: int, joins: bool) -> Any:
    """Rank 2 dies in the last of 3 passes.

    With ``joins``, another one comes before the end of the next update.
    """
    import keras
    import numpy as np

    import horovod.keras as hvd
    from horovod import context

    slot = int(os.environ["HOROVOD_SLOT"])
    hvd.init()

    class Die(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                hvd.allreduce(np.ones(1, "float32"), name="all have done two passes")
            if (slot, batch) == (2, 2):
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            while joins and batch == 3 and hvd.size() == 2 and not context.wants_change():
                time.sleep(0.01)

    model = _counting(samples)
    state = hvd.elastic.KerasState(model)

    @hvd.elastic.run
    def train(state: Any) -> None:
        x = np.eye(samples, dtype="float32")
        hvd.elastic.fit(
            state, x, np.ones((samples, 1)), batch_size=2, epochs=1, callbacks=[Die()], shuffle=False, verbose=0
        )

    train(state)
    return model.get_weights()[0].reshape(-1).tolist()


def _fit_with_a_missed_pass(folder: Path, size: int, samples: int) -> Any:
    """Rank 2 dies in the second of 3 passes, which rank 0 has begun; rank 1 knows of the loss before it begins.

    Of four ranks, rank 3 dies while the others send their states.
    """
    import keras
    import numpy as np

    import horovod.keras as hvd
    from horovod.errors import PeerLostError

    slot, begun = int(os.environ["HOROVOD_SLOT"]), folder / "begun"
    hvd.init()
    taken: list[Any] = []

    class Rows:
        shape, dtype = (samples, samples), np.dtype("float32")

        def __len__(self) -> int:
            return samples

        def __getitem__(self, rows: Any) -> Any:
            taken.append(rows)
            if (slot, len(taken)) == (0, 3):  # the first batch is one to look at
                begun.touch()
            return np.eye(samples, dtype="float32")[rows]

    class Die(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if (slot, batch) == (1, 1) and hvd.size() == size:
                with pytest.raises(PeerLostError):
                    hvd.allreduce(np.ones(1, "float32"), name="until rank 2 is lost")
            while (slot, batch) == (2, 1):
                if begun.exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)

    model = _counting(samples)

    class State(hvd.elastic.KerasState):  # type: ignore[misc]
        def sync(self) -> None:
            if (slot, hvd.size()) == (3, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            super().sync()

    state = State(model)

    @hvd.elastic.run
    def train(state: Any) -> None:
        shard = hvd.elastic.shard((Rows(), np.ones((samples, 1))), batch_size=2)
        hvd.elastic.fit(state, shard, epochs=1, callbacks=[Die()], verbose=0)

    train(state)
    return model.get_weights()[0].reshape(-1).tolist(), int(model.optimizer._iterations)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "samples", "passes"), [(3, 16, 3), (4, 32, 6)])
def test_a_survivor_adds_up_the_pass_that_it_has_missed(
    backend: str, size: int, samples: int, passes: int, tmp_path: Path
) -> None:
    """It left that pass out, whose samples count as used."""
    args, policy = (tmp_path, size, samples), Policy(size, minimum=2)
    with ElasticJob(_fit_with_a_missed_pass, policy, {"a": size}, args, f"keras-{backend}") as job:
        found = job.values()
    assert sorted(slot.number for slot in found) == [0, 1]
    zeros = [0] * 4 * (size - 2)  # two batches of each lost rank
    for weights, done in found.values():
        assert sorted(weights) == pytest.approx([*zeros, *[1] * (samples - len(zeros))])
        assert done == passes


@pytest.mark.slow
def test_the_sums_of_survivors_stay_their_own(backend: str) -> None:
    """Those of rank 0 counted its samples once for each rank, and left out those of the others."""
    with ElasticJob(_fit_with_passes, Policy(3, minimum=2), {"a": 3}, (16, False), framework=f"keras-{backend}") as job:
        weights = job.values()
    assert sorted(slot.number for slot in weights) == [0, 1]
    for found in weights.values():
        assert sorted(found) == pytest.approx([0] * 4 + [1] * 12), "two batches of the lost rank are missing"


@pytest.mark.slow
def test_a_rank_that_joins_between_two_updates_has_no_sums(backend: str) -> None:
    """It took those of rank 0, whose samples then counted twice."""
    policy = Policy(3, minimum=2, cool_down_s=(0, 0))
    with ElasticJob(_fit_with_passes, policy, {"a": 3}, (32, True), framework=f"keras-{backend}") as job:
        weights = job.values()
    assert sorted(slot.number for slot in weights) == [0, 1, 2]
    for found in weights.values():
        assert sorted(found) == pytest.approx([0] * 4 + [1] * 28), "two batches of the lost rank are missing"


@pytest.mark.slow
@on_ranks(1, given=["backend"])
def test_a_start_from_a_checkpoint_begins_without_sums() -> None:
    """All ranks took those of the rank that had written the file, and so did each one that joined later."""
    import keras
    import numpy as np

    import horovod.keras as hvd

    hvd.init()
    states = []
    for passes in (3, 0):
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2), loss="mse")
        states.append(hvd.elastic.KerasState(model))
        if passes:
            model.fit(np.ones((passes, 2)), np.ones((passes, 1)), batch_size=1, verbose=0)
    wrote, read = (state.model.optimizer for state in states)
    states[1].load_checkpoint(states[0].checkpoint())
    for one, other in zip(wrote.variables, read.variables, strict=True):
        wanted = np.array(keras.ops.convert_to_numpy(one))
        if "accumulator" in one.path:
            assert wanted.any(), "the third pass"
            wanted[:] = 0
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(other), wanted, err_msg=one.path)


@pytest.mark.slow
@on_ranks(2, given=["backend"])
def test_a_sync_keeps_the_sums_of_each_rank_even_if_it_fails() -> None:
    """A rank lost meanwhile left those of rank 0; an update that this rank had missed left its own in place."""
    from dataclasses import replace

    import keras
    import numpy as np

    import horovod.keras as hvd
    from horovod.errors import PeerLostError

    hvd.init()
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2), loss="mse")
    state = hvd.elastic.KerasState(model)
    model.fit(np.ones((1, 2)), np.full((1, 1), 7.0 + hvd.rank()), verbose=0)

    def sums() -> float:
        return float(sum(abs(state._arrays(state._sums())[0]).reshape(-1)))

    own, kit = sums(), state._kit

    def broadcast(variables: Any, root: int) -> None:
        kit.broadcast(variables, root)
        raise PeerLostError("another rank")

    state._kit = replace(kit, broadcast=broadcast)
    with pytest.raises(PeerLostError):
        state.sync()
    assert own > 0 and sums() == own
    state._kit = kit
    state.sync()
    assert sums() == own
    if hvd.rank() == 0:
        model.optimizer._iterations.assign(3)
    state.sync()
    assert sums() == (0 if hvd.rank() else own)
