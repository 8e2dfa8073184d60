"""Each fault in TF_CONFIG gives an error that names it."""

from __future__ import annotations

import atexit
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from khorovod_ipu.tensorflow import peers
from khorovod_ipu.tensorflow.cluster import Cluster, ClusterError, check_port, check_variable, read
from khorovod_ipu.tensorflow.peers import WorkerLostError, WorkerWatch

TWO = ["host0:2222", "host1:2222"]


def config(**changes: Any) -> str:
    whole = {"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 0}, **changes}
    return json.dumps({name: value for name, value in whole.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "TF_CONFIG is not set"),
        ("", "TF_CONFIG is not set"),
        ('{"cluster": {"worker": ["a:1", }', "TF_CONFIG is not JSON: Expecting value at character 31"),
        ("[1]", "must be an object of JSON"),
        (config(cluster=None), 'has no "cluster"'),
        (config(cluster={"worker": "host0:2222"}), 'the addresses of "worker" must be a list'),
        (config(cluster={"worker": [2222]}), 'an address of "worker" must be text, host:port. Received: 2222'),
        (config(cluster={"worker": []}), r"names no worker: its jobs are \['worker'\]"),
        (config(task=None), 'has no "task"'),
        (config(task={"type": "worker"}), '"task" lacks "index"'),
        (config(task={"index": 0}), '"task" lacks "type"'),
        (config(task={"type": "worker", "index": "one"}), "must be a number"),
        (config(task={"type": "worker", "index": 2}), "index 2 is out of range, the cluster has 2 of 'worker'"),
        (config(task={"type": "worker", "index": -1}), "Indices go from 0 to 1"),
        (config(task={"type": "chief", "index": 0}), "is said to be a 'chief', but the jobs"),
    ],
)
def test_what_is_wrong_with_the_variable_is_said(text: str | None, what: str) -> None:
    with pytest.raises(ClusterError, match=what):
        check_variable(text)


def resolver(jobs: dict[str, list[str]], job: str | None = "worker", index: int | None = 0) -> Any:
    return SimpleNamespace(
        cluster_spec=lambda: SimpleNamespace(as_dict=lambda: jobs), task_type=job, task_id=index, rpc_layer=None
    )


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (resolver({}), "names no worker: its jobs are none"),
        (resolver({"ps": ["a:1"]}), r"names no worker: its jobs are \['ps'\]"),
        (resolver({"worker": TWO}, None, None), "does not say which task this process is"),
        (resolver({"worker": TWO}, index=3), "index 3 is out of range"),
        (resolver({"worker": TWO, "ps": ["a:1"]}, "ps"), "a 'ps' does not train"),
        (resolver({"worker": ["host0"]}), "must be host:port. Received: 'host0'"),
        (resolver({"worker": ["host0:99999"]}), "must be host:port"),
        (resolver({"worker": ["grpc://host0:1"]}), "must be host:port. Received: 'grpc://host0:1'"),
        (resolver({"worker": ["a:1", "a:1"]}), "a:1 is the address of two workers"),
        (resolver({"worker": ["localhost:1", "127.0.0.1:1"]}), "localhost:1 and 127.0.0.1:1 is the address of two"),
    ],
)
def test_what_is_wrong_with_a_resolver_is_said(given: Any, what: str) -> None:
    with pytest.raises(ClusterError, match=what):
        read(given)


def test_a_chief_is_worker_0() -> None:
    found = read(resolver({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, index=1))
    assert (found.rank, found.size, found.tasks[0]) == (2, 3, ("chief", 0))
    assert found.device(2, "/device:CPU:0") == "/job:worker/replica:0/task:1/device:CPU:0"


def two(ports: list[int], rank: int = 0) -> Cluster:
    return Cluster((("worker", 0), ("worker", 1)), tuple(f"127.0.0.1:{port}" for port in ports), rank)


def test_a_port_of_this_process_is_told_from_a_free_one() -> None:
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert check_port(two([port, 1]))
    assert not check_port(two([port, 1]))


def test_who_has_not_come_is_named() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        cluster = two([1, taken.getsockname()[1]])
        with pytest.raises(WorkerLostError, match=r"waited 0\.2 s for /job:worker/task:1 at 127\.0\.0\.1:\d+"):
            WorkerWatch(cluster, print).wait_for_all(0.2)


@contextmanager
def watched(found: list[str]) -> Iterator[tuple[WorkerWatch, socket.socket]]:
    """A watch on another worker, and the server of that one."""
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(60)
        watch = WorkerWatch(two([1, server.getsockname()[1]]), found.append)
        watch.wait_for_all(60)
        yield watch, server


def test_who_is_lost_is_named_and_a_closed_connection_alone_is_no_loss() -> None:
    found: list[str] = []
    with watched(found) as (watch, server):
        server.accept()[0].close()
        again, _ = server.accept()  # it looks whether somebody is there
        assert not found
    again.close()
    assert "/job:worker/task:1" in watch.lost(60)
    watch.close()
    assert len(found) == 1


def test_who_waits_is_told_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(peers, "_REMIND_S", 0.0)
    monkeypatch.setattr(logging.getLogger("horovod"), "propagate", True)
    with caplog.at_level("WARNING", "horovod"), pytest.raises(WorkerLostError):
        WorkerWatch(two([1, 1]), print).wait_for_all(0.3)
    assert "waiting for /job:worker/task:1 at 127.0.0.1:1, for " in caplog.text


def test_a_connection_that_meets_itself_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens, the kernel may take the port of the worker that is still to come."""
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.connect(made.getsockname())
    attempts = [made]

    def connect(*_: Any) -> socket.socket:
        if not attempts:
            raise ConnectionRefusedError
        return attempts.pop()

    monkeypatch.setattr(peers.socket, "create_connection", connect)
    with pytest.raises(WorkerLostError, match="no server listens there"):
        WorkerWatch(two([1, 1]), print).wait_for_all(0.2)
    assert made.fileno() == -1  # the port is free again


def test_when_the_process_ends_nobody_is_lost_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions and servers are taken down then: a watch that closed them, too, would meet what is gone."""
    found: list[str] = []
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    with watched(found) as (watch, server):
        connection, _ = server.accept()
        [end] = at_exit
        end()
    connection.close()
    assert watch.lost(60) == "" and not found
