"""Ranks on a real Dask cluster of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

dask = pytest.importorskip("dask", reason="needs: pip install khorovod[dask]")
distributed = pytest.importorskip("distributed", reason="needs: pip install khorovod[dask]")
# A thread of Dask's that never ends must begin before a test does, which looks for threads that it has left.
distributed.utils._offload_executor.submit(int).result()


@pytest.fixture
def client() -> Iterator[Any]:
    cluster = distributed.LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0")
    with cluster, distributed.Client(cluster) as client:
        yield client


def _train(scale: float, dies: int = -1, fails: int = -1, returns: int = -1) -> tuple[Any, ...]:
    import numpy as np

    import horovod.numpy as hvd

    hvd.init()
    if hvd.rank() == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == fails:
        raise ValueError(f"rank {fails} has no data")
    if hvd.rank() == returns:
        return ()
    total: Any = hvd.allreduce(np.full(3, scale * (hvd.rank() + 1)), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), total.tolist(), os.getpid()


def _train_for_ever(begun: str) -> None:
    import numpy as np

    import horovod.numpy as hvd

    hvd.init()
    hvd.barrier()
    Path(begun).touch()
    while True:
        hvd.allreduce(np.ones(3))


def _train_until(begun: str, over: str) -> int:
    import numpy as np

    import horovod.numpy as hvd

    hvd.init()
    Path(begun).touch()
    while not hvd.allreduce(np.array(float(Path(over).exists())), op=hvd.Max):
        pass
    return hvd.rank()


def test_an_interrupt_ends_the_ranks(client: Any, tmp_path: Path) -> None:
    from horovod.dask import run

    def interrupt() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(_train_for_ever, (str(tmp_path / "begun"),), client=client)
    thread.join()
    assert len(run(_train, (1.0,), client=client)) == 3


@pytest.mark.parametrize("how", ["close", "restart"])
def test_a_client_that_closes_or_restarts_the_cluster_ends_the_ranks(client: Any, tmp_path: Path, how: str) -> None:
    from horovod.dask import run
    from horovod.errors import LaunchError

    with distributed.Client(client.cluster) as other, ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, _train_for_ever, (str(tmp_path / "begun"),), client=other)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        getattr(other, how)()
        with pytest.raises(LaunchError, match="Dask cancelled rank 0 on worker tcp://"):
            running.result(300)
        client.wait_for_workers(3)
        assert len(run(_train, (1.0,), client=client)) == 3


def test_another_client_of_this_process_may_close_meanwhile(client: Any, tmp_path: Path) -> None:
    from horovod.dask import run

    with distributed.Client(client.cluster.scheduler_address) as other, ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, _train_until, (str(tmp_path / "begun"), str(tmp_path / "over")), client=client)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        other.close()  # the current one of all threads until now
        (tmp_path / "over").touch()
        assert running.result(300) == [0, 1, 2]


def test_ranks_run_in_the_workers_and_again(client: Any) -> None:
    from horovod.dask import run

    for size in (3, 2):
        found = run(_train, (2.0,), client=client, num_proc=size)
        total = [2.0 * sum(range(1, size + 1))] * 3
        assert [result[:4] for result in found] == [(rank, size, rank, total) for rank in range(size)]
        assert len({result[4] for result in found} - {os.getpid()}) == size


def _train_with_data(rank_without: int, seconds: float, initialized: str) -> int:
    """One rank finds no data before ``init()``, for which the others wait already, or not yet."""
    rank = int(os.environ["HOROVOD_RANK"])
    if rank == rank_without:
        time.sleep(seconds)
        raise ValueError("no data")
    import horovod.numpy as hvd

    while not seconds and not Path(initialized).exists():
        time.sleep(0.01)
    hvd.init()
    return hvd.rank()


@pytest.mark.parametrize(("rank", "seconds"), [(0, 1.0), (1, 1.0), (1, 0.0)])
def test_ranks_wait_in_init_no_longer_than_the_job_lasts(
    client: Any, tmp_path: Path, rank: int, seconds: float
) -> None:
    from horovod.dask import run

    with pytest.raises(ValueError, match="no data"):
        run(_train_with_data, (rank, seconds, str(tmp_path / "go")), client=client)
    (tmp_path / "go").touch()
    assert len(run(_train, (1.0,), client=client)) == 3


def test_a_lost_worker_and_a_failing_rank_are_named_and_nothing_runs_twice(client: Any) -> None:
    from horovod.dask import run
    from horovod.errors import LaunchError

    for retries in (0, 3):
        with pytest.raises(ValueError, match="rank 1 has no data"), dask.annotate(retries=retries):
            run(_train, (1.0,), {"fails": 1}, client=client)
    with pytest.raises(Exception, match="rank 2"):
        run(_train, (1.0,), {"dies": 2}, client=client)
    with pytest.raises(Exception, match=r"rank 1 .* has left the job: its function has returned, while rank \d waited"):
        run(_train, (1.0,), {"returns": 1}, client=client)
    for wrong in (9, 0, "2"):
        with pytest.raises(LaunchError, match=f"num_proc={wrong!r}, and the Dask cluster has"):
            run(_train, (1.0,), client=client, num_proc=wrong)
    for args in ("1.0", 1.0):
        with pytest.raises(ValueError, match="args must be a list or tuple of the function's arguments"):
            run(_train, args, client=client)  # type: ignore[arg-type]


def _next_rank_waits() -> bool:
    stacks = [traceback.walk_stack(frame) for frame in sys._current_frames().values()]
    return ["wait", "wait", "_rank"] in [[frame.f_code.co_name for frame, _ in islice(stack, 3)] for stack in stacks]


def _fail_while_another_rank_computes(is_over: str) -> None:
    if os.environ["HOROVOD_RANK"] == "1":
        raise ValueError("no data")
    while not (_next_rank_waits() or Path(is_over).exists()):
        time.sleep(0.01)


def test_a_rank_waits_until_one_of_a_failed_call_has_left_another_thread_of_its_worker(tmp_path: Path) -> None:
    from horovod.dask import run

    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0")
    with cluster, distributed.Client(cluster) as client:
        with pytest.raises(ValueError, match="no data"):
            run(_fail_while_another_rank_computes, (str(tmp_path / "over"),), client=client)
        try:
            assert len(run(_train, (1.0,), client=client)) == 2
        finally:
            (tmp_path / "over").touch()


def test_ranks_that_are_threads_of_one_process_are_refused() -> None:
    from horovod.dask import run
    from horovod.errors import LaunchError

    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0")
    with cluster, distributed.Client(cluster) as client:
        with pytest.raises(LaunchError, match="start the cluster with processes=True"):
            run(_train, (1.0,), client=client)
        assert run(_train, (2.0,), client=client, num_proc=1)[0][:4] == (0, 1, 0, [2.0] * 3)


def test_closed_and_asynchronous_clients_are_refused() -> None:
    from horovod.dask import run
    from horovod.errors import LaunchError

    match = "needs an open client that is not asynchronous. Received: <Client: "
    cluster = distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0")

    async def call() -> None:
        async with distributed.Client(cluster.scheduler_address, asynchronous=True) as client:
            with pytest.raises(LaunchError, match=match):
                run(_train, (1.0,), client=client)

    with cluster, distributed.Client(cluster) as client:
        asyncio.run(call())
    with pytest.raises(LaunchError, match=match):
        run(_train, (1.0,), client=client)
