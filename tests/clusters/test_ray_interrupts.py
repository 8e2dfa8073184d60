"""Functions of ranks on Ray that end early: by Ctrl-C in the script of ``RayExecutor``, a deadlock, ``sys.exit``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import held_port

pytest.importorskip("ray", reason="needs: pip install khorovod[ray]")

_SCRIPT = """
import fcntl, os, pathlib, signal, sys, threading, time
import ray
from ray.cluster_utils import Cluster
begun, port, address = pathlib.Path({begun!r}), {port}, {address!r}
mixed = begun.with_name("mixed")
node = dict(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, ray_client_server_port=port)
cluster = Cluster(True, head_node_args=node)
with open(ray.__file__) as lock:  # the client's servers of two clusters of this machine could listen at the same port
    fcntl.flock(lock, fcntl.LOCK_EX)
    ray.init(address or cluster.address, log_to_driver=False)
from horovod.errors import LaunchError
from horovod.ray import RayExecutor

def for_ever():
    begun.touch()
    while True:
        time.sleep(0.1)

def size():
    import horovod.numpy as hvd
    hvd.init()
    return hvd.size()

def in_two_orders():
    import horovod.numpy as hvd, numpy as np
    hvd.init()
    for name in ("xy", "yx")[hvd.rank()]:
        hvd.allreduce(np.ones(2), name=name)

def without_data():
    if os.environ["HOROVOD_RANK"] == "1":
        raise ValueError("no data")
    import horovod.numpy as hvd
    hvd.init()
    mixed.touch()

def without_data_later():
    if os.environ["HOROVOD_RANK"] == "1":
        time.sleep(2)
    without_data()

def interrupt():
    while not begun.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
executor.start()
threading.Thread(target=interrupt).start()
try:
    executor.run(for_ever)
except KeyboardInterrupt:
    print("interrupted")
try:
    executor.run(size)
except LaunchError as error:
    print(error)
executor.shutdown()
executor.start()
try:
    executor.run(without_data)
except ValueError as error:
    # Rank 0 waited in init(), and must not meet rank 1's next call there.
    print("no data" in str(error), executor.run(size), mixed.exists())
executor.shutdown()
executor.start(extra_env_vars=dict(HOROVOD_DEADLOCK_CHECK_TIME_SECONDS="0.5"))
try:
    ray.get(executor.run_remote(without_data_later))
except ValueError as error:
    print(executor.run(size), mixed.exists())
try:
    executor.run(in_two_orders)
except Exception as error:
    print("Ranks 0, 1 wait for each other, and will for ever" in str(error))
print(executor.run(size), executor.execute_single(lambda _: os.getpid()) != os.getpid())
executor.shutdown()
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.parametrize("through_client", [False, True], ids=["in-the-cluster", "client"])
def test_an_interrupt_ends_the_ranks(through_client: bool, tmp_path: Path) -> None:
    # With gRPC's support of forks, the client's server may crash while it starts another one.
    environ = os.environ | {
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "GRPC_ENABLE_FORK_SUPPORT": "0"
    }  # fmt: skip
    with held_port() as port:
        address = f"ray://127.0.0.1:{port}" if through_client else ""
        script = _SCRIPT.format(begun=str(tmp_path / "begun"), port=port, address=address)
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=300, check=True, env=environ
        )
    interrupted, refused, *again = done.stdout.splitlines()
    assert interrupted == "interrupted"
    assert "call shutdown(), then start()" in refused if through_client else "call start() first" in refused
    assert again == ["True [2, 2] False", "[2, 2] False", "True", "[2, 2] True"]


@pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::DeprecationWarning:ray")
def test_ranks_may_leave_only_elastic_jobs() -> None:
    from horovod.errors import LaunchError
    from horovod.ray import BaseHorovodWorker

    worker, call = BaseHorovodWorker(), (sys.exit, (0,), {})
    assert worker.call_elastic({}, None, call, None) is None
    with pytest.raises(LaunchError, match=r"ended with sys.exit\(0\) instead of returning"):
        worker.call(call, None)
    with pytest.raises(LaunchError, match=r"ended with sys.exit\(3\) instead of returning"):
        worker.start_executable(sys.exit, [3])
