"""Learning rates and accumulation that follow the number of ranks; shards of arrays and sequences."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from harness import on_ranks

from horovod import context
from horovod.bindings.elastic.rates import LearningRateScale, passes_for
from horovod.bindings.elastic.shard import shard
from horovod.errors import RequestError


def be(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Make this process a rank."""
    world = SimpleNamespace(rank=rank, size=size)
    monkeypatch.setattr(context, "world", lambda: world)


def test_a_rate_goes_to_its_new_value_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [{"lr": 0.1}, {"lr": 1.0}]
    scale = LearningRateScale(groups, reference_size=4, ramp_steps=3)
    seen = []
    for size, steps in ((4, 2), (2, 5), (8, 2)):
        be(monkeypatch, 0, size)
        for _ in range(steps):
            scale.step()
            seen.append(groups[1]["lr"])
    assert seen == pytest.approx([1, 1, 0.875, 0.75, 0.625, 0.5, 0.5, 0.875, 1.25])
    assert groups[0]["lr"] == pytest.approx(0.125)
    other = LearningRateScale([{"lr": 0.1 * scale.factor}], 4, 3)
    other.load_state_dict(scale.state_dict())
    other.step()
    scale.step()
    assert other.factor == scale.factor == pytest.approx(1.625)
    assert LearningRateScale(groups, 1).state_dict() == {"factor": 1.0, "target": 1.0, "left": 0}


def test_a_failed_step_leaves_rates_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SimpleNamespace(learning_rate=0.5)
    scale = LearningRateScale(optimizer, reference_size=2, ramp_steps=1)
    be(monkeypatch, 0, 4)
    assert scale.step() == 1.5
    optimizer.learning_rate = 0.5  # a state has undone it where the optimizer's values are variables
    scale.reset()
    assert (scale.factor, optimizer.learning_rate) == (1.0, 0.5)
    scale.step()
    scale.confirm()
    scale.reset()
    assert (scale.factor, optimizer.learning_rate) == (1.5, 0.75)
    with pytest.raises(RequestError, match="follows a schedule of its own"):
        LearningRateScale([SimpleNamespace(learning_rate=lambda step: 0.1)], 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
@on_ranks(1, returns=[[0.25, 0.5, 0.25, 0.5]], given=["backend"])
def test_the_rate_of_a_keras_optimizer_follows() -> list[float]:
    """The rates of an optimizer that is meant for two ranks on one: in a step, after it has failed, and in the next."""
    import keras

    import horovod.keras as hvd

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer)
    scale = hvd.elastic.LearningRateScale(optimizer, reference_size=2)
    state = hvd.elastic.KerasState(model, rate=scale)
    state.capture()
    scale.step()
    found = [float(optimizer.learning_rate)]
    state.undo()
    scale.reset()
    found.append(float(optimizer.learning_rate))
    scale.step()
    return [*found, float(optimizer.learning_rate), scale.factor]


def test_a_global_batch_stays_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, passes in ((4, 2), (3, 3), (8, 1), (16, 1), (1, 8)):
        be(monkeypatch, 0, size)
        assert passes_for(256, 32) == passes
    with pytest.raises(ValueError, match="must be 1 or more"):
        passes_for(0, 1)


class Pair(NamedTuple):
    """A batch whose parts have names."""

    x: Any
    y: Any


FORMS = {
    "array": np.arange(37),
    "tuple": (np.arange(37), np.arange(37) * 2),
    "named tuple": Pair(np.arange(37), np.arange(37) * 2),
    "dict": {"x": np.arange(37), "y": list(range(37))},
    "list of arrays": [np.arange(37), np.arange(37)],
    "sequence": list(range(37)),
}


@pytest.mark.parametrize("form", FORMS)
def test_shards_use_every_sample_once_while_ranks_change(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(batch: Any) -> list[int]:
        if "tuple" in form:
            assert type(batch) is type(FORMS[form])
            assert (batch[0] * 2 == batch[1]).all()
        is_nest = "tuple" in form or form == "list of arrays"
        first = batch["x"] if form == "dict" else batch[0] if is_nest else batch
        return [int(number) for number in first]

    used: list[int] = []
    state: Any = None
    for size, steps in ((3, 2), (2, 1), (4, 99)):
        handed = []
        for rank in range(size):
            be(monkeypatch, rank, size)
            own = shard(FORMS[form], batch_size=3)
            if state is not None:
                own.load_state_dict(state)
            handed.append([])
            for batch in itertools.islice(own, steps):
                handed[-1].append(numbers(batch))
                own.confirm()
            end = own.state_dict()
            next(iter(own), None)  # is handed out, and not used
            own.reset()
            assert own.state_dict() == end
        assert len({len(batches) for batches in handed}) == 1
        used += [number for batches in handed for batch in batches for number in batch]
        state = end
    assert sorted(used) == list(range(37))
    own.set_epoch(1)
    assert next(iter(own)) is not None


@pytest.mark.parametrize("done", [1, 4])
def test_a_loop_does_not_go_on_after_a_change(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the change has undone its last step, so that it has no batch left."""
    be(monkeypatch, 0, 3)
    own = shard(np.arange(36), batch_size=3)
    loop = iter(own)
    be(monkeypatch, 0, 3)  # as in a script that makes the loop before the ranks have met
    for _ in range(done):
        assert len(next(loop)) == 3
    be(monkeypatch, 0, 2)
    own.reset()
    with pytest.raises(ValueError, match=r"after a change of the ranks.* inside the function of hvd\.elastic\.run"):
        next(loop)
    assert len(list(own)) == 6


def test_rows_of_pandas_go_by_place_and_not_by_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of arrays do, with which they are dealt; ``train_test_split`` leaves such labels."""
    pandas = pytest.importorskip("pandas")
    be(monkeypatch, 0, 1)
    order = [3, 0, 4, 1, 2]
    frame = pandas.DataFrame({0: np.arange(5), 1: np.arange(5) * 2}).iloc[order]
    ((table, column, array),) = shard([frame, frame[0], frame[0].to_numpy()], batch_size=5)
    assert table.columns.tolist() == [0, 1]
    assert table[1].tolist() == [number * 2 for number in order]
    assert column.tolist() == array.tolist() == order
    assert next(iter(shard(frame, batch_size=2))).index.tolist() == order[:2]


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pass list\(data\).*Received: list_iterator"):
        shard(iter([1, 2]), 1)
    with pytest.raises(ValueError, match="Received: list_iterator"):
        shard((np.zeros(2), iter([1, 2])), 1)
    with pytest.raises(ValueError, match="arrays must have one length"):
        shard((np.zeros(3), np.zeros(4)), 1)
    with pytest.raises(ValueError, match="nothing to deal"):
        shard({}, 1)
