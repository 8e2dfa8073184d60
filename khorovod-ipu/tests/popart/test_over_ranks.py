"""PopART on several ranks: the arithmetic, what is on its way while backward runs, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import LIMIT_S, Ranks, run_ranks
from popart_models import mlp, options, session_of, step, weights_of

import popart

ROWS, STEPS = 24, 3
#: Options, and hyperparameters that are not PopART's defaults.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "momentum, decay, loss scaling": (
        {},
        {"defaultMomentum": (0.9, True), "defaultWeightDecay": (0.01, True), "lossScaling": (8.0, True)},
    ),
    "two replicas of two micro-batches": (
        {"replicatedGraphCount": 2, "accumulationFactor": 2,
         "accumulationAndReplicationReductionType": popart.ReductionType.Mean}, {},
    ),
    "the host updates": ({"hostWeightUpdate": True}, {"defaultWeightDecay": (0.01, True), "lossScaling": (8.0, True)}),
    "the host updates two replicas": (
        {"hostWeightUpdate": True, "replicatedGraphCount": 2,
         "accumulationAndReplicationReductionType": popart.ReductionType.Mean}, {},
    ),
}  # fmt: skip


ADAM = {"defaultEps": (1e-3, True)}


def data() -> tuple[Any, Any]:
    """Rows of all ranks together, for each step."""
    random = np.random.RandomState(3)
    return random.randn(STEPS, ROWS, 4).astype(np.float32), random.randint(0, 3, (STEPS, ROWS)).astype(np.int32)


def train(case: str, rank: int, size: int, reduce: bool) -> dict[str, Any]:
    """Train on this rank's rows."""
    chosen, hyperparameters = CASES[case]
    parts = chosen.get("replicatedGraphCount", 1) * chosen.get("accumulationFactor", 1)
    if not reduce:
        chosen = {k: v for k, v in chosen.items() if not k.startswith("host")}
        if size == 1:  # one rank on the whole batch, in one piece
            chosen, parts = {}, 1
    first, second = (popart.SGD({"defaultLearningRate": (rate, False), **hyperparameters}) for rate in (0.2, 0.05))
    made = options(hostAllReduce=reduce, **chosen)
    session = session_of(mlp(ROWS // size // parts, seed=rank), made, first, batches=STEPS)
    if reduce:
        import horovod.popart as hvd

        hvd.DistributedOptimizer(first, session, made).insert_host_allreduce()
        hvd.broadcast_weights(session, root_rank=0)
    session.weightsFromHost()
    x, label = data()
    share = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    # Twice: the state of the first run is the start of the second.
    for half in range(2):
        session.updateOptimizerFromHost(second if half else first)
        step(session, {"x": np.ascontiguousarray(x[:, share] + half), "label": np.ascontiguousarray(label[:, share])})
    return weights_of(session)


def _train_all() -> dict[str, dict[str, Any]]:
    import horovod.popart as hvd

    return {case: train(case, hvd.rank(), hvd.size(), reduce=True) for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_together_are_one_rank_on_the_whole_batch(size: int) -> None:
    results = run_ranks(size, _train_all, framework="popart")
    for case in CASES:
        alone = train(case, 0, 1, reduce=False)
        for result in results:
            for name, weight in alone.items():
                np.testing.assert_allclose(result[case][name], weight, rtol=2e-5, atol=2e-6, err_msg=f"{case} {name}")
                assert (result[case][name] == results[0][case][name]).all(), f"{case}: ranks have different bits"


def _half_weights(on_host: bool) -> Any:
    import horovod.popart as hvd

    builder = popart.Builder()
    w = builder.addInitializedInputTensor(np.full(4, 0.01, np.float16), "w")
    loss = builder.aiGraphcore.l1loss([w], 1.0, popart.ReductionType.Sum)
    optimizer = popart.ConstSGD(1e-3, loss_scaling=2.0**15)
    chosen = options(hostAllReduce=True, hostWeightUpdate=on_host)
    session = session_of((builder.getModelProto(), loss), chosen, optimizer)
    hvd.DistributedOptimizer(optimizer, session, chosen).insert_host_allreduce()
    session.weightsFromHost()
    step(session, {})
    return weights_of(session)["w"]


@pytest.mark.slow
def test_the_host_updates_weights_in_half_precision_by_scaled_gradients() -> None:
    [on_host], [on_device] = (run_ranks(1, _half_weights, choice, framework="popart") for choice in (True, False))
    np.testing.assert_array_equal(on_host, on_device)
    np.testing.assert_allclose(on_host, 0.009, atol=1e-5)


def _train_plain() -> dict[str, Any]:
    import horovod.popart as hvd

    assert (hvd.local_size(), hvd.cross_size()) == (1, 2)
    return train("plain", hvd.rank(), hvd.size(), reduce=True)


@pytest.mark.slow
def test_two_hosts_are_one_rank_on_the_whole_batch() -> None:
    alone = train("plain", 0, 1, reduce=False)
    for result in run_ranks(2, _train_plain, framework="popart", hosts=(1, 1)):
        for name, weight in alone.items():
            np.testing.assert_allclose(result[name], weight, rtol=2e-5, atol=2e-6)


def _overlap(path: str) -> None:
    import threading
    import time

    import horovod.popart as hvd
    from horovod.popart.sessions import comm

    chosen, optimizer = options(hostAllReduce=True), popart.ConstSGD(0.1)
    session = session_of(mlp(4), chosen, optimizer)
    callbacks: dict[str, Any] = {}
    connect = session.connectStreamToCallback
    session.connectStreamToCallback = lambda h, cb, i: (callbacks.setdefault(h, cb), connect(h, cb, i))
    distributed = hvd.DistributedOptimizer(optimizer, session, chosen)
    distributed.insert_host_allreduce()
    session.weightsFromHost()
    last = "gradientStore__Gradient___w1"

    def wait_then_store(pointer: Any) -> None:
        # Backward stands still here; the gradient of the last layer must get through meanwhile.
        deadline = time.monotonic() + LIMIT_S
        while not comm.poll(distributed._gradients["w2"]._handle):
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)
        callbacks[last](pointer)

    connect(last, wait_then_store, 0)
    hvd.start_timeline(path)
    step(session, {"x": np.ones((4, 4), np.float32), "label": np.zeros(4, np.int32)})
    hvd.stop_timeline()


def test_the_last_layers_gradient_is_reduced_before_the_first_layers_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_ranks(2, _overlap, str(path), framework="popart")
    events = json.loads(path.read_text())
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank in (0, 1):
        by_name = {
            layer: [e for e in events if e["ph"] == "X" and e["pid"] == rank + 1
                    and rows[e["pid"], e["tid"]] == f"allreduce.Gradient___{layer}"]
            for layer in ("w1", "w2")
        }  # fmt: skip
        [reduced] = [e for e in by_name["w2"] if e["name"] == "ALLREDUCE"]
        stored = min(e["ts"] for e in by_name["w1"])
        assert reduced["ts"] + reduced["dur"] <= stored
        assert Path(reduced["args"]["site"].rpartition(":")[0]).name == "popart_models.py", "the line of session.run"


def _broadcasts() -> dict[str, Any]:
    import horovod.popart as hvd

    def with_running_means(seed: int) -> Any:
        builder = popart.Builder()
        x = builder.addInputTensor("FLOAT", [4, 2, 3, 3], "x")
        start = [np.full(2, 1.0 + seed + i, np.float32) for i in range(4)]
        names = [builder.addInitializedInputTensor(a, n) for a, n in zip(start, ("scale", "shift", "mean", "var"))]
        y, *_ = builder.aiOnnx.batchnormalization([x, *names], 5)
        loss = builder.aiGraphcore.l1loss([y], 1.0)
        return session_of((builder.getModelProto(), loss), options(hostAllReduce=True))

    session = with_running_means(hvd.rank())
    hvd.broadcast_weights(session, root_rank=hvd.size() - 1)
    names = {"mean", "var"} | {n.removeprefix("gradientStore__Gradient___") for n in session.getHostReduceStreamIds()
                               if n.startswith("gradientStore")}  # fmt: skip
    found = {name: array.tolist() for name, array in weights_of(session).items()}
    assert names == set(found)
    # Weights of one name and different shapes: every rank is told, and can go on.
    other = session_of(mlp(2) if hvd.rank() == 0 else mlp(2, seed=1))
    hvd.broadcast_weights(other)
    odd = with_running_means(0) if hvd.rank() == 0 else session_of(mlp(2))
    with pytest.raises(hvd.HorovodInternalError, match="broadcast_weights needs the same names on every rank"):
        hvd.broadcast_weights(odd)
    chosen = options(hostAllReduce=True)
    unlike = with_running_means(0) if hvd.rank() == 0 else session_of(mlp(2), chosen)
    with pytest.raises(
        hvd.HorovodInternalError, match=r"insert_host_allreduce needs the same names[^$]*only rank 0 has"
    ):
        hvd.DistributedOptimizer(popart.ConstSGD(0.1), unlike, chosen).insert_host_allreduce()
    return found


def test_all_weights_are_broadcast_running_means_too_and_different_models_are_told() -> None:
    results = run_ranks(2, _broadcasts, framework="popart")
    assert results[0] == results[1] == {"scale": [2.0, 2.0], "shift": [3.0, 3.0], "mean": [4.0, 4.0], "var": [5.0, 5.0]}


def _dies(path: str) -> str:
    import horovod.popart as hvd

    chosen, optimizer = options(hostAllReduce=True), popart.ConstSGD(0.1)
    session = session_of(mlp(2), chosen, optimizer)
    connect = session.connectStreamToCallback
    if hvd.rank() == 1:
        session.connectStreamToCallback = lambda handle, callback, index: connect(
            handle, callback if "w2" in handle else lambda _: os.kill(os.getpid(), signal.SIGKILL), index
        )
    hvd.DistributedOptimizer(optimizer, session, chosen).insert_host_allreduce()
    session.weightsFromHost()
    try:
        step(session, {"x": np.ones((2, 4), np.float32), "label": np.zeros(2, np.int32)})
    except hvd.HorovodInternalError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_middle_of_backward_is_an_error_of_run_on_the_others() -> None:
    outcomes = Ranks(2, _dies, ["x"], framework="popart").outcomes()
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert "rank 1" in outcomes[0].value and "SIGKILL" in outcomes[0].value


def _interrupted() -> None:
    import horovod.popart as hvd

    chosen, optimizer = options(hostAllReduce=True), popart.ConstSGD(0.1)
    session = session_of(mlp(2), chosen, optimizer)
    distributed = hvd.DistributedOptimizer(optimizer, session, chosen)
    distributed.insert_host_allreduce()
    session.weightsFromHost()
    inputs = {"x": np.ones((2, 4), np.float32), "label": np.zeros(2, np.int32)}
    connect = session.connectStreamToCallback

    def interrupt(pointer: Any) -> None:
        raise KeyboardInterrupt

    connect("gradientStore__Gradient___w1", interrupt, 0)  # w2 is on its way by then
    with pytest.raises(KeyboardInterrupt):
        step(session, inputs)
    with pytest.raises(AssertionError, match=r"w2 was stored twice .*\(rank \d.*Call insert_host"):
        step(session, inputs)
    distributed.insert_host_allreduce()
    hvd.broadcast_weights(session)
    session.weightsFromHost()
    step(session, inputs)


def test_after_a_step_that_was_interrupted_the_ranks_can_start_again() -> None:
    run_ranks(2, _interrupted, framework="popart")


def _distributed(enable: bool) -> dict[str, Any]:
    import horovod.popart as hvd

    chosen = options(replicatedGraphCount=2, enableDistributedReplicatedGraphs=True,
                     accumulationAndReplicationReductionType=popart.ReductionType.Mean)  # fmt: skip
    chosen.globalReplicationFactor, chosen.globalReplicaOffset = 2 * hvd.size(), 2 * hvd.rank()
    model, loss = mlp(ROWS // hvd.size() // 2, seed=hvd.rank())
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 2})
    session = hvd.DistributedTrainingSession(
        fnModel=model, dataFlow=popart.DataFlow(STEPS, {}), loss=loss, optimizer=popart.Adam(ADAM),
        deviceInfo=device, userOptions=chosen, enableEngineCaching=enable,
    )  # fmt: skip
    session.prepareDevice()
    session.broadcastWeights() if enable else hvd.broadcast_weights(session)
    session.weightsFromHost()
    x, label = data()
    share = slice(hvd.rank() * ROWS // hvd.size(), (hvd.rank() + 1) * ROWS // hvd.size())
    step(session, {"x": np.ascontiguousarray(x[:, share]), "label": np.ascontiguousarray(label[:, share])})
    with pytest.raises(hvd.HorovodInternalError, match="each of the 2 ranks would train by itself"):
        hvd.DistributedTrainingSession(dataFlow=None, userOptions=options())
    wrong = options(enableDistributedReplicatedGraphs=True)
    with pytest.raises(popart.popart_exception, match=r"do not fit process . of 2 with 1 replicas each"):
        session_of(mlp(2), wrong)
    return weights_of(session)


def test_distributed_replicated_graphs_sum_over_all_processes_with_any_optimizer() -> None:
    results = run_ranks(2, _distributed, True, framework="popart")
    session = session_of(mlp(ROWS), None, popart.Adam(ADAM), batches=STEPS)
    session.weightsFromHost()
    step(session, dict(zip(("x", "label"), data())))
    for result in results:
        for name, weight in weights_of(session).items():
            np.testing.assert_allclose(result[name], weight, rtol=2e-5, atol=2e-6)


def _apart() -> tuple[list[str], Any]:
    import horovod.popart as hvd

    rank, found = hvd.rank(), []
    chosen = options(enableDistributedReplicatedGraphs=True)
    chosen.globalReplicationFactor, chosen.globalReplicaOffset = hvd.size(), rank
    rate = {"defaultLearningRate": (0.1, False)}
    inputs = {"x": np.ones((2, 4), np.float32), "label": np.zeros(2, np.int32)}

    def failure(session: Any, batches: int = 1, given: Any = inputs) -> None:
        session.weightsFromHost()
        with pytest.raises(popart.popart_exception) as error:
            step(session, {name: np.concatenate([array] * batches) for name, array in given.items()})
        found.append(str(error.value))

    failure(session_of(mlp(2), chosen, popart.SGD(rate) if rank else popart.Adam(rate)))
    failure(session_of(mlp(2), chosen, None, batches=1 + rank), 1 + rank)
    failure(session_of(mlp(2, seed=rank), chosen))
    session = session_of(mlp(2), chosen, popart.Adam(rate))
    session.weightsFromHost()
    step(session, inputs)
    session.updateOptimizerFromHost(popart.Adam({"defaultLearningRate": (0.1 + rank, False)}))
    with pytest.raises(popart.popart_exception) as error:
        step(session, inputs)
    found.append(str(error.value))
    session.updateOptimizerFromHost(popart.Adam(rate))
    step(session, inputs)
    if rank == 0:  # a state that one process alone has loaded
        session.writeWeights(popart.PyWeightsIO({"OptimizerState___Adam.steps___w1": np.array(7, np.float32)}))
    failure(session)
    session.broadcastWeights()
    session.weightsFromHost()
    step(session, inputs)
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [64], "x")
    y = builder.aiOnnx.mul([x, builder.addInitializedInputTensor(np.ones(64, np.float32), "w")])
    dropped, *_ = builder.aiOnnx.dropout([y], 1)
    loss = builder.aiGraphcore.l1loss([dropped], 1.0)
    wanted = {dropped: popart.AnchorReturnType("All")}
    session = session_of((builder.getModelProto(), loss), chosen, anchors=wanted)
    session.setRandomSeed(5)
    session.weightsFromHost()
    ones = {"x": np.ones(64, np.float32)}
    mask = step(session, ones)[dropped]
    reduced = builder.aiGraphcore.replicatedallreduce([loss])
    failure(session_of((builder.getModelProto(), reduced), chosen), given=ones)
    return found, (mask, weights_of(session)["w"])


def test_processes_that_would_train_apart_are_told_what_differs() -> None:
    (found, (mask, weight)), (others, (other, same)) = run_ranks(2, _apart, framework="popart")
    expected = (
        "class of the optimizer differs (process 0: \"Adam\"; process 1: \"SGD\")",
        "run() differs (process 0: 1 batches", "broadcastWeights() and weightsFromHost(), differs",
        "learningRate differs", "broadcastWeights() and weightsFromHost(), differs",
    )  # fmt: skip
    for texts in (found, others):
        assert len(texts) == 6 and all(part in text for part, text in zip(expected, texts)), texts
        assert "replicatedallreduce" in texts[-1]
    assert (mask != other).any() and (weight == same).all(), "each process drops other elements, of the same weights"


def _wrong_uses() -> None:
    import horovod.popart as hvd

    plain = session_of(mlp(2))
    with pytest.raises(ValueError, match=r"set options.hostAllReduce = True"):
        hvd.DistributedOptimizer(popart.ConstSGD(0.1), plain, options())
    chosen = options(hostAllReduce=True)
    device = popart.DeviceManager().createCpuDevice()
    model, loss = mlp(2)
    unprepared = popart.TrainingSession(model, popart.DataFlow(1, {}), loss, popart.ConstSGD(0.1), device,
                                        userOptions=chosen)  # fmt: skip
    distributed = hvd.DistributedOptimizer(popart.ConstSGD(0.1), unprepared, chosen)
    with pytest.raises(ValueError, match=r"call init\(\)|init"):
        distributed.insert_host_allreduce()
    hvd.init()
    with pytest.raises(ValueError, match=r"after prepareDevice\(\), on a training session"):
        distributed.insert_host_allreduce()
    with pytest.raises(ValueError, match="takes TrainingSession's arguments by name"):
        hvd.DistributedTrainingSession(fnModel=model)


def test_what_is_called_too_early_or_with_something_else_says_so() -> None:
    run_ranks(1, _wrong_uses, init=False, framework="popart")
