"""Ranks in the tasks of a real Spark application: two executors on this machine, with one slot each."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sql = pytest.importorskip("pyspark.sql", reason="needs: pip install khorovod[spark]")
if shutil.which("java") is None and not os.environ.get("HOROVOD_TEST_CLUSTERS"):
    pytest.skip("needs Java 17: apt-get install openjdk-17-jre-headless", allow_module_level=True)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    settings = {
        "driver.host": "127.0.0.1", "driver.bindAddress": "127.0.0.1", "driver.memory": "512m",
        "executor.memory": "512m", "ui.enabled": "false", "ui.showConsoleProgress": "false",
    }  # fmt: skip
    builder = sql.SparkSession.builder.master("local-cluster[2,1,1024]")
    for name, value in settings.items():
        builder = builder.config(f"spark.{name}", value)
    session = builder.getOrCreate()
    # The first job opens connections that Spark keeps; a test looks for files that it has left.
    assert session.sparkContext.parallelize(range(2), 2).map(lambda x: x + 1).collect() == [1, 2]
    yield session
    session.stop()


def _kill_above(what: str) -> None:
    """Kill the nearest process above this one whose command has a word: a task, or an executor."""
    pid = os.getpid()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if what in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
            return
    raise LookupError(what)


def _train(scale: float, fails: int = -1, kills: str = "", log: str = "") -> tuple[Any, ...]:
    import horovod.numpy as hvd

    hvd.init()
    if log:
        with open(log, "a") as file:
            file.write(f"{hvd.rank()} ")
    print(f"rank {hvd.rank()} is here")
    if hvd.rank() == fails:
        raise ValueError(f"rank {fails} has no data")
    if kills:
        hvd.barrier()  # all have written their line
    if hvd.rank() == 1 and kills:
        _kill_above(kills)
        signal.pause()
    total: Any = hvd.allreduce(np.full(3, scale * (hvd.rank() + 1)), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total, os.environ.get("COLOR"), os.getpid()


def test_results_come_in_rank_order_with_the_environment_and_the_output(spark: Any) -> None:
    import horovod.spark

    out, err = io.StringIO(), io.StringIO()
    found = horovod.spark.run(_train, (2.0,), num_proc=2, env={"COLOR": "red"}, stdout=out, stderr=err)
    assert [result[:4] for result in found] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    for result in found:
        np.testing.assert_array_equal(result[4], 2.0 * (np.full(3, 1) + np.full(3, 2)))
        assert result[5] == "red"
    assert len({result[6] for result in found} - {os.getpid()}) == 2
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:rank 0 is here", "[1]<stdout>:rank 1 is here"]
    assert "horovod.spark.run: starting 2 ranks on" in err.getvalue()
    (alone,) = horovod.spark.run(lambda: _train(3.0), num_proc=1, verbose=0)
    assert alone[:4] == (0, 1, 0, 1)


def test_a_rank_that_fails_is_named_with_its_traceback(spark: Any) -> None:
    import horovod.spark
    from horovod.errors import LaunchError

    with pytest.raises(LaunchError, match=rf"rank 1 on {socket.gethostname()} \(pid \d+\) failed") as caught:
        horovod.spark.run(_train, (1.0,), {"fails": 1}, stderr=io.StringIO())
    assert "in _train" in str(caught.value) and "ValueError: rank 1 has no data" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("what", ["daemon", "CoarseGrainedExecutorBackend"])
def test_a_lost_task_or_executor_ends_the_others_and_nothing_runs_twice(spark: Any, what: str, tmp_path: Path) -> None:
    import horovod.spark
    from horovod.errors import LaunchError

    log = tmp_path / "log"
    with pytest.raises(LaunchError, match=r"the Spark task on host .* was lost with rank 1"):
        horovod.spark.run(_train, (1.0,), {"kills": what, "log": str(log)}, num_proc=2, stderr=io.StringIO())
    assert sorted(log.read_text().split()) == ["0", "1"]
    found = horovod.spark.run(_train, (1.0,), num_proc=2)  # on an executor that Spark starts anew
    assert [result[0] for result in found] == [0, 1]


@pytest.mark.parametrize("how", ["all", "group"])
def test_a_job_that_spark_cancels_is_not_a_lost_task_alone(spark: Any, how: str) -> None:
    import horovod.spark
    from horovod.errors import LaunchError

    context = spark.sparkContext

    class Cancelling(io.StringIO):
        def write(self, text: str) -> int:
            context.cancelJobGroup("the caller's") if how == "group" else context.cancelAllJobs()
            return len(text)

    def wait() -> None:
        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 0:
            print("all ranks have begun", flush=True)
        hvd.allgather_object(hvd.rank() == 0 and signal.pause())

    context.setJobGroup("the caller's", "jobs of this test")
    try:
        with pytest.raises(LaunchError, match=r"Spark has aborted the job .* cancelled .*; .* was lost with rank"):
            horovod.spark.run(wait, num_proc=2, stdout=Cancelling(), stderr=io.StringIO())
        assert context.getLocalProperty("spark.jobGroup.id") == "the caller's"
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)


def test_too_few_slots_and_wrong_calls_are_errors_at_once(spark: Any) -> None:
    import horovod.spark
    from horovod.errors import LaunchError

    with pytest.raises(LaunchError, match=r"num_proc=3, and the Spark application has 2 slots \(local-cluster"):
        horovod.spark.run(_train, (1.0,), num_proc=3)
    with pytest.raises(ValueError, match="num_proc must be at least 1"):
        horovod.spark.run(_train, (1.0,), num_proc=0)
    with pytest.raises(ValueError, match="num_proc must be at least 1; received '2'"):
        horovod.spark.run(_train, (1.0,), num_proc="2")  # type: ignore[arg-type]
    for call in (horovod.spark.run, horovod.spark.run_elastic):
        with pytest.raises(ValueError, match="start_timeout must be a number of seconds, at least 0; received -1"):
            call(_train, (1.0,), num_proc=1, start_timeout=-1)
    with pytest.raises(ValueError, match="env has a variable that no process can have: 'A=B'='c'"):
        horovod.spark.run(print, num_proc=1, env={"A=B": "c"})
    with pytest.raises(ValueError, match=r"env must map names of variables to texts; received \{'A': 1\}"):
        horovod.spark.run_elastic(_train, (1.0,), num_proc=1, env={"A": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="nics must be names of network interfaces"):
        horovod.spark.run(_train, (1.0,), num_proc=1, nics=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stdout must be a text stream, such as open\('log', 'w'\); received 'log'"):
        horovod.spark.run(_train, (1.0,), num_proc=1, stdout="log")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^min_num_proc must be a whole number of at least 1; received '0'"):
        horovod.spark.run_elastic(_train, (1.0,), num_proc=1, min_num_proc=0)
    assert horovod.spark.run_elastic(lambda: 7, num_proc=2, verbose=0) == [7, 7]
    with pytest.raises(ValueError, match="no MPI"):
        horovod.spark.run(_train, (1.0,), use_mpi=True)
    with pytest.raises(ValueError, match="must be callable"):
        horovod.spark.run("train", num_proc=1)  # type: ignore[arg-type]


def test_without_num_proc_each_task_has_its_cores(spark: Any) -> None:
    import horovod.spark

    conf, seen = spark.sparkContext._conf, []
    try:
        for key in ("spark.task.cpus", "spark.default.parallelism"):
            conf.set(key, "2")
            seen.append(horovod.spark.run(lambda: 7))
    finally:
        for key in ("spark.task.cpus", "spark.default.parallelism"):
            conf._jconf.remove(key)
    assert seen == [[7], [7, 7]]


def test_without_a_context_in_this_process_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import horovod.spark

    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    with pytest.raises(RuntimeError, match="there is no active SparkContext: create one"):
        horovod.spark.run(_train, (1.0,), num_proc=1)
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with pytest.raises(RuntimeError, match="Spark Connect has none: start the script with spark-submit"):
        horovod.spark.run_elastic(_train, (1.0,), num_proc=1)


def test_slots_that_another_job_holds_are_counted_when_the_time_is_over(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import horovod.spark
    from horovod.errors import LaunchError
    from horovod.spark.application import Application, TaskJob
    from horovod.spark.tasks import RankTasks

    def hold(index: int, rows: Any) -> Iterator[int]:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.recv(1)
        return iter([index])

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        other = TaskJob(Application(), 1, hold, "another job")
        held, _ = server.accept()
        look = RankTasks._look
        # The time is over once a task has come, however long that takes.
        monkeypatch.setattr(RankTasks, "_look", lambda each, n, until: look(each, n, 0.0 if n else until))
        with held, pytest.raises(LaunchError, match="Spark has started 1 of 2 tasks within 300 s"):
            horovod.spark.run(_train, (1.0,), num_proc=2, start_timeout=300)
    other.close(is_well=True)
    assert not other.failure()
    early = TaskJob(Application(), 2, lambda index, rows: iter([signal.pause()]), "cancelled before it was submitted")
    early.close(is_well=False)
    assert early.has_ended


def test_strangers_have_no_effect_and_get_no_answer(spark: Any) -> None:
    import msgspec
    import zmq

    from horovod._version import __version__
    from horovod.rendezvous import curve
    from horovod.spark.options import JobOptions
    from horovod.spark.relay import Registration
    from horovod.spark.tasks import RankTasks

    options = JobOptions("test", None, None, None, 0, None, False)
    tasks = RankTasks(options, 2, None, 60, runs_again=False)
    context: zmq.Context[Any] = zmq.Context()
    try:
        where = next(at for at in tasks.listener.endpoints if "127.0.0.1" in at)
        stranger = curve.client_socket(context, b"another secret" * 3)
        stranger.immediate = False
        stranger.connect(where)
        task = Registration(__version__, 0, "machine", "stranger", "python", 1, "")
        stranger.send(msgspec.msgpack.encode(task))
        with socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2]))) as plain:
            plain.sendall(b"\x80\x04hello" * 1000)
            found = tasks.wait()
        assert sorted(each.registration.partition for each in found) == [0, 1]
        assert {each.registration.nodename for each in found} == {socket.gethostname()}
        assert not stranger.poll(0)
        for each in found:
            each.close()
    finally:
        tasks.close(is_well=True)
        context.destroy()


ROWS, STEP = 24, 0.001


def _data() -> tuple[Any, Any]:
    generator = np.random.default_rng(7)
    return generator.standard_normal((ROWS, 3)), generator.standard_normal(ROWS)


def _train_elastic(steps: int, dies_at: int, mark: str, kills: str) -> dict[str, Any]:
    import horovod.numpy as hvd

    hvd.init()
    x, y = _data()
    seen: dict[str, Any] = {"sizes": [], "pid": os.getpid()}

    @hvd.elastic.run
    def train(state: Any) -> None:
        seen["sizes"].append(hvd.size())
        while state.step < steps or hvd.size() < 2:
            own = slice(hvd.rank(), None, hvd.size())
            gradient = x[own].T @ (x[own] @ state.weights - y[own])
            state.weights -= STEP * hvd.allreduce(gradient, op=hvd.Sum, name="gradient")
            state.step += 1
            if hvd.rank() == 1 and state.step == dies_at and not Path(mark).exists():
                Path(mark).touch()
                _kill_above(kills)
                signal.pause()  # until the keeper has noticed
            state.commit()

    state = hvd.elastic.NumpyState(weights=np.zeros(3), step=0)
    train(state)
    return {**seen, "rank": hvd.rank(), "weights": state.weights, "steps": state.step}


@pytest.mark.parametrize(("what", "fewest"), [("daemon", 1), ("keeper", 2)], ids=["task", "keeper"])
def test_an_elastic_job_outlives_a_task_and_its_weights_are_those_of_an_undisturbed_run(
    spark: Any, tmp_path: Path, what: str, fewest: int
) -> None:
    import horovod.spark

    err = io.StringIO()
    mark = tmp_path / "killed"
    found = horovod.spark.run_elastic(
        _train_elastic, (20, 7, str(mark), what), num_proc=2, min_num_proc=fewest, elastic_timeout=300, stderr=err
    )
    assert mark.exists(), "nothing was killed"
    assert [result["rank"] for result in found] == [0, 1]
    assert found[0]["sizes"] == ([2, 1, 2] if fewest == 1 else [2, 2]) and found[1]["sizes"] == [2], err.getvalue()
    # The new task may be there before the others say that they wait for it.
    late = "(waiting until 2 or more can go on|2 ranks continue at step 7)"
    goes_on = "1 rank continues at step 7" if fewest == 1 else late
    lost = rf"rank 1 \(on .*:1\) was lost with its Spark task: .*; {goes_on}"
    assert re.search(lost, err.getvalue()), err.getvalue()
    x, y = _data()
    weights = np.zeros(3)
    for _ in range(found[0]["steps"]):
        weights = weights - STEP * (x.T @ (x @ weights - y))
    for result in found:
        assert result["steps"] == found[0]["steps"]
        np.testing.assert_allclose(result["weights"], weights, rtol=1e-9)


def test_an_elastic_job_that_spark_ends_before_the_ranks_have_met_waits_for_no_task(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import horovod.spark
    from horovod.errors import LaunchError

    class Cancelling(io.StringIO):
        def write(self, text: str) -> int:
            spark.sparkContext.cancelAllJobs()
            return len(text)

    def wait() -> None:
        print("a process has begun", flush=True)
        signal.pause()

    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "60")  # its end would be another error
    with pytest.raises(LaunchError, match=r"no Spark task is left\nSpark has aborted the job .*cancelled"):
        horovod.spark.run_elastic(wait, num_proc=2, stdout=Cancelling(), stderr=io.StringIO())
