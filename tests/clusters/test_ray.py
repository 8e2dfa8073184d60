"""Ranks on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rays
from ports import held_port

from horovod.errors import LaunchError

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
ray = pytest.importorskip("ray", reason="needs: pip install khorovod[ray]")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

no_leaks, pytestmark = rays.no_leaks, rays.MARKS
_STORE, _STEPS, _WIDTH = 80 << 20, 6, 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": _STORE}
    with held_port() as port:
        cluster = Cluster(True, head_node_args={**node, "include_dashboard": False, "ray_client_server_port": port})
        cluster.client_port = port
        try:
            cluster.add_node(**node)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def _executor(wait_s: int = 60, **kwargs: Any) -> Any:
    from horovod.ray import RayExecutor

    return RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=wait_s), **kwargs)


class _Sum:
    """An executable that keeps a sum, and is a rank."""

    def __init__(self, begin: float, factor: float) -> None:
        import horovod.numpy as hvd

        hvd.init()
        self.factor, self.total = factor, np.full(3, begin)

    def add(self, value: float) -> list[float]:
        import horovod.numpy as hvd

        self.total = self.total + self.factor * hvd.allreduce(np.full(3, value * (hvd.rank() + 1)), op=hvd.Sum)
        return self.total.tolist()


def _places(base: int, dies: int = -1, fails: int = -1) -> tuple[Any, ...]:
    import horovod.numpy as hvd
    from horovod.ray import ray_logger

    hvd.init()
    if hvd.rank() == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == fails:
        raise ValueError(f"rank {fails} has no data")
    total = hvd.allreduce(np.arange(3.0) + base + hvd.rank(), op=hvd.Sum)
    ray_logger.log({"rank": hvd.rank(), "base": base})
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank(), total.tolist(), gpus, os.getpid()


def test_ranks_of_two_nodes_compute_what_one_process_does_and_give_all_back(cluster: Any) -> None:
    executor, heard = _executor(num_hosts=2, num_workers_per_host=2, use_gpu=True), list[dict[str, Any]]()
    executor.start(_Sum, [1.0], {"factor": 2.0}, {"FROM_THE_USER": "yes"})
    found = executor.run(_places, [10], callbacks=[heard.append])
    total = sum(np.arange(3.0) + 10 + rank for rank in range(4)).tolist()
    assert [each[:6] for each in found] == [(rank, 4, rank % 2, rank // 2, total, "0,1") for rank in range(4)]
    assert len({result[6] for result in found} - {os.getpid()}) == 4
    assert sorted(each["rank"] for each in heard) == [0, 1, 2, 3]
    assert executor.execute(lambda each: each.add(1.0)) == [[21.0] * 3] * 4
    assert executor.execute(lambda each: each.add(0.5)) == [[31.0] * 3] * 4
    assert executor.execute_single(lambda each: each.total.tolist()) == [31.0] * 3
    assert [each[0] for each in ray.get(executor.run_remote(_places, kwargs={"base": 1}))] == [0, 1, 2, 3]
    assert executor.run(lambda: os.environ["FROM_THE_USER"]) == ["yes"] * 4
    executor.shutdown()
    group = ray.util.placement_group([{"CPU": 2, "GPU": 2}] * 2, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=60)
    ray.util.remove_placement_group(group)


def test_a_failing_function_and_a_killed_actor_are_named(cluster: Any) -> None:
    executor = _executor(num_workers=3)
    executor.start()
    with pytest.raises(ValueError, match="rank 1 has no data") as caught:
        executor.run(_places, [0], {"fails": 1})
    if sys.version_info >= (3, 11):
        assert "raised on rank 1 (actor " in caught.value.__notes__[0]
    before = executor.run(_places, [0])
    assert [each[0] for each in before] == [0, 1, 2]
    pid = before[2][6]
    for _ in range(2):  # in the call, and whenever it is used afterwards
        with pytest.raises(LaunchError, match=rf"rank 2 \(actor \w+, pid {pid}, node [\d.]+-\w+\) died .*killed"):
            executor.run(_places, [0], {"dies": 2})
    executor.shutdown()
    executor.start()
    assert [each[:2] for each in executor.run(_places, [0])] == [(0, 3), (1, 3), (2, 3)]
    executor.shutdown()


_CLIENT = """
import fcntl, sys
sys.path[:0] = {paths}
import ray, test_ray
from horovod.errors import LaunchError
from horovod.ray import ElasticRayExecutor
fcntl.flock(lock := open(ray.__file__), fcntl.LOCK_EX)  # as in test_ray_interrupts
ray.init("ray://127.0.0.1:{port}", log_to_driver=False)
executor, heard = test_ray._executor(num_workers=2), []
executor.start(test_ray._Sum, [1.0], {{"factor": 2.0}})
print([each[:5] for each in executor.run(test_ray._places, [10], callbacks=[heard.append])], len(heard))
print(executor.execute(lambda each: each.add(1.0)))
elastic = ElasticRayExecutor(ElasticRayExecutor.create_settings(2, 2))
elastic.start()
print([each[0] for each in ray.get(executor.run_remote(test_ray._places, [1]))], elastic.run(lambda: 3))
try:
    executor.run(test_ray._places, [10], {{"dies": 1}})
except LaunchError as error:
    print("rank 1 (actor" in str(error))
executor.shutdown()
"""


def test_the_same_holds_through_ray_client(cluster: Any) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    code = _CLIENT.format(paths=paths, port=cluster.client_port)
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert found.stdout.splitlines() == [
        "[(0, 2, 0, 0, [21.0, 23.0, 25.0]), (1, 2, 1, 0, [21.0, 23.0, 25.0])] 2",
        "[[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]",
        "[0, 1] [3, 3]",
        "True",
    ]


def test_workers_run_in_the_placement_group_of_their_caller(cluster: Any) -> None:
    def inside() -> Any:
        executor = _executor(num_workers=2)
        executor.start()
        try:
            return executor.run(lambda: ray.util.get_current_placement_group().id.hex())
        finally:
            executor.shutdown()

    group = ray.util.placement_group([{"CPU": 1}] * 3)
    ray.get(group.ready(), timeout=60)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0, True)
    found = ray.get(ray.remote(inside).options(num_cpus=1, scheduling_strategy=strategy).remote(), timeout=300)
    assert found == [group.id.hex()] * 2
    ray.util.remove_placement_group(group)


def test_what_the_cluster_does_not_have_is_said(cluster: Any) -> None:
    with pytest.raises(TimeoutError, match=r"could not reserve 9 x \{'CPU': 1\}.*within 1 s"):
        _executor(1, num_workers=9).start()
    few = r"within 1 s \(HOROVOD_ELASTIC_TIMEOUT\)\nthe Ray nodes have room for 0 of at least 1 workers with .*99"
    for fewest, cpus, timeout_s, said in (
        (1, 99, 1, few),
        (9, 1, 300, r"exit code 0, before the ranks had met\n.* of at least 9 workers"),
    ):
        executor = _executor(min_workers=fewest, cpus_per_worker=cpus, elastic_timeout=timeout_s)
        executor.start()
        with pytest.raises(LaunchError, match=said):
            executor.run(int)


def test_calls_in_the_wrong_order_are_refused(cluster: Any) -> None:
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        _executor(num_workers=1).run(int)
    elastic = _executor(min_workers=1)
    elastic.start()
    for wrong, said in (((None,), "must be callable; received None"), ((int, 3), "args must be a list .*received int")):
        with pytest.raises(ValueError, match=said):
            elastic.run(*wrong)
    for call in (elastic.run_remote, elastic.execute_single):
        with pytest.raises(NotImplementedError, match="elastic"):
            call(int)


def _train(dies: tuple[int, int], until: int = 0) -> dict[str, Any]:
    """Train; the process of one rank kills itself at a step, and steps go on until there are so many ranks."""
    import horovod.numpy as hvd
    from horovod import context
    from horovod.ray import ray_logger

    hvd.init()
    state = hvd.elastic.NumpyState(weights=np.zeros(_WIDTH), batch=0)
    pids = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        pids.append(os.getpid())
        ray_logger.log({"size": hvd.size(), "rank": hvd.rank()})
        while state.batch < _STEPS or (until and hvd.size() != until):
            if (hvd.rank(), state.batch, context.membership().number) == (*dies, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            data = np.arange(_WIDTH) * (hvd.rank() + 1.0) + state.batch
            state.weights = state.weights * 0.9 + hvd.allreduce(data, op=hvd.Sum)
            state.batch += 1
            state.commit()

    train(state)
    return {"rank": hvd.rank(), "size": hvd.size(), "weights": state.weights.tolist(), "pids": pids}


def _alone(size: int) -> Any:
    weights = np.zeros(_WIDTH)
    for batch in range(_STEPS):
        weights = weights * 0.9 + sum(np.arange(_WIDTH) * (rank + 1.0) + batch for rank in range(size))
    return weights


def test_a_killed_actor_of_an_elastic_job_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others leave room for one worker on the first node, and for two on the other."""
    node = [{"ray.io/node-id": ray.nodes()[0]["NodeID"]}]
    others = ray.util.placement_group([{"CPU": 1}], bundle_label_selector=node)
    ray.get(others.ready(), timeout=60)
    executor = _executor(min_workers=3, max_workers=3)
    executor.start()
    found = executor.run(_train, [(2, 3)])
    ray.util.remove_placement_group(others)
    assert [(each["rank"], each["size"]) for each in found] == [(rank, 3) for rank in range(3)]
    np.testing.assert_allclose([each["weights"] for each in found], [_alone(3)] * 3, rtol=1e-12)
    assert sorted(len(each["pids"]) for each in found) == [1, 2, 2]  # two processes went on
    lines = capsys.readouterr().err.splitlines()
    assert any("horovod.ray: rank 2 (actor " in line and "3 ranks continue at step 3" in line for line in lines), lines
    assert lines[-1].startswith("horovod.ray: 1 loss and 1 join by step ")


def test_an_error_in_a_worker_of_an_elastic_job_is_the_cause_of_its_end(cluster: Any) -> None:
    def fail() -> None:
        import horovod.numpy as hvd

        hvd.init()

        @hvd.elastic.run
        def train(state: Any) -> None:
            if hvd.rank() == 1:
                raise ValueError("no data")
            hvd.barrier()

        train(hvd.elastic.NumpyState(batch=0))

    executor = _executor(min_workers=2, max_workers=2, elastic_timeout=100)
    executor.start()
    with pytest.raises(LaunchError, match=r"rank 1 \(actor .*raised ValueError: no data, as another did") as caught:
        executor.run(fail)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_elastic_job_begins_with_what_its_discovery_lists(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.ray import ElasticRayExecutor

    def begin(plan: Any, sinks: Any, options: Any, *_: Any) -> None:
        raise StopIteration(options.num_proc)

    monkeypatch.setattr("horovod.ray.elastic.run_on_pool", begin)
    settings, node = ElasticRayExecutor.create_settings(1), ray.get_runtime_context().get_node_id()
    settings.discovery = SimpleNamespace(find_available_hosts_and_slots=lambda: {node: 1})
    executor = ElasticRayExecutor(settings, override_discovery=False)
    executor.start()
    with pytest.raises(StopIteration, match=r"^1$"):
        executor.run(lambda: None)


def test_an_elastic_job_takes_a_node_that_comes_and_leaves_one_that_goes(cluster: Any) -> None:
    from horovod.ray import ElasticRayExecutor

    heard: queue.Queue[int] = queue.Queue()
    executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(4), env_vars={"FROM_THE_USER": "yes"})
    executor.start()

    def train() -> Any:
        import horovod.numpy as hvd
        from horovod import context
        from horovod.ray import ray_logger

        hvd.init()
        state = hvd.elastic.NumpyState(total=np.zeros(2))

        @hvd.elastic.run
        def run(state: Any) -> None:
            if hvd.rank() == 0:
                ray_logger.log({"size": hvd.size()})
            while context.membership().number < 3 or hvd.size() != 4:
                time.sleep(0.05)  # a step; the node that comes needs the cores as well
                state.total += hvd.allreduce(np.ones(2), op=hvd.Sum)
                state.commit()

        run(state)
        return hvd.rank(), hvd.size(), os.environ["FROM_THE_USER"]

    # Ray starts nodes only in the main thread.
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(executor.run, train, callbacks=[lambda info: heard.put(info["size"])])
        assert heard.get(timeout=200) == 4
        node = cluster.add_node(num_cpus=1, object_store_memory=_STORE)
        assert heard.get(timeout=200) == 5
        cluster.remove_node(node, allow_graceful=False)
        assert heard.get(timeout=200) == 4
        assert job.result(timeout=200) == [(rank, 4, "yes") for rank in range(4)]


def test_ray_train_reports_and_begins_again_at_the_last_checkpoint_after_a_loss(cluster: Any, tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from horovod.ray.train import DataParallelTrainer, HorovodConfig

    def loop(config: dict[str, Any]) -> None:
        from ray import train

        import horovod.numpy as hvd

        hvd.init()
        begin, weights, checkpoint = 0, np.zeros(_WIDTH), train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                saved = json.loads((Path(folder) / "state").read_text())
                begin, weights = saved["batch"], np.array(saved["weights"])
        for batch in range(begin, _STEPS):
            if batch == config["dies"] and hvd.rank() == 1 and not Path(config["mark"]).exists():
                Path(config["mark"]).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            data = np.arange(_WIDTH) * (hvd.rank() + 1.0) + batch
            weights = weights * 0.9 + hvd.allreduce(data, op=hvd.Sum)
            found = {"batch": batch + 1, "weights": weights.tolist()}
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "state").write_text(json.dumps(found))
                own = train.Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
                train.report({**found, "begin": begin, "size": hvd.size(), "env": os.environ["OWN"]}, checkpoint=own)

    result = DataParallelTrainer(
        loop,
        train_loop_config={"dies": 3, "mark": str(tmp_path / "died")},
        backend_config=HorovodConfig(env={"OWN": "yes"}),
        scaling_config=ScalingConfig(num_workers=(2, 3)),
        run_config=RunConfig(storage_path=str(tmp_path), name="run", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    # Ray may not have taken the last report of the lost group.
    assert (tmp_path / "died").exists() and result.metrics["begin"] <= 3 and result.metrics["batch"] == _STEPS
    assert (result.metrics["size"], result.metrics["env"]) == (3, "yes")
    np.testing.assert_allclose(result.metrics["weights"], _alone(3), rtol=1e-12)
    with result.checkpoint.as_directory() as folder:
        assert json.loads((Path(folder) / "state").read_text())["batch"] == _STEPS


def test_a_trial_of_ray_tune_trains_on_ranks(cluster: Any, tmp_path: Path) -> None:
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.tune.integration.ray_train import TuneReportCallback

    from horovod.ray.train import DataParallelTrainer, HorovodConfig

    def loop(config: dict[str, float]) -> None:
        from ray import train

        import horovod.numpy as hvd

        hvd.init()
        total = hvd.allreduce(np.full(2, config["x"] + hvd.rank()), op=hvd.Sum)
        train.report({"total": float(total[0]), "size": hvd.size()})

    def trial(config: dict[str, float]) -> None:
        run_config = RunConfig(storage_path=str(tmp_path), name="inner", callbacks=[TuneReportCallback()])
        DataParallelTrainer(
            loop, train_loop_config=config, backend_config=HorovodConfig(), run_config=run_config,
            scaling_config=ScalingConfig(num_workers=2),
        ).fit()  # fmt: skip

    outer = tune.RunConfig(storage_path=str(tmp_path), name="outer", verbose=0)
    (found,) = tune.Tuner(trial, param_space={"x": tune.grid_search([3.0])}, run_config=outer).fit()
    assert (found.metrics["total"], found.metrics["size"]) == (7.0, 2)
