"""Workers over gRPC that wait in different operations: what is proven to last for ever, and what is not."""

from __future__ import annotations

import queue
import socket
from contextlib import closing
from typing import Any

import pytest

from khorovod_ipu.tensorflow.cluster import Cluster
from khorovod_ipu.tensorflow.deadlocks import Lookout, WorkerProgress, deadlocked

_FOR_EVER_S = 3600.0


@pytest.mark.parametrize(
    ("states", "proven"),
    [
        ([{"reduce 1": 5}, {"reduce 2": 1}], True),
        ([{"reduce 1": 5}, {"reduce 1": 4}], True),  # the second is a call behind, and waits as if it were not
        ([{"reduce 1": 5}, {"reduce 1": 5}], False),  # all are there: its bytes are on their way
        ([{"reduce 1": 5, "reduce 2": 5}, {"reduce 1": 5}], False),
        ([{"reduce 1": 5}, {}], False),  # it computes, or reads
        ([{"reduce 1": 5}, None], False),  # it has not been heard
        ([{"reduce 1": 5}, {"reduce 1": 5}, {"reduce 2": 5}], True),
        ([{"reduce 1": 5}], False),
    ],
)
def test_only_what_lasts_for_ever_is_a_deadlock(states: list[Any], proven: bool) -> None:
    assert deadlocked(states) is proven


def test_who_moves_or_is_in_no_operation_is_not_stuck() -> None:
    progress = WorkerProgress()
    assert progress.stuck_in(0.0) == {}
    progress.enter("reduce 1")
    assert progress.stuck_in(_FOR_EVER_S) == {}
    progress._computed = _FOR_EVER_S  # as if it had taken nothing of a processor
    assert progress.stuck_in(0.0) == {"reduce 1": 1}
    progress._computed = -_FOR_EVER_S  # as if it had computed all the time
    assert progress.stuck_in(0.0) == {}
    progress.leave("reduce 1")
    progress.enter("reduce 1")
    progress._computed = _FOR_EVER_S
    assert progress.stuck_in(0.0) == {"reduce 1": 2}


def _two() -> tuple[str, str]:
    """Addresses whose UDP ports are free."""
    with closing(socket.socket(type=socket.SOCK_DGRAM)) as one, closing(socket.socket(type=socket.SOCK_DGRAM)) as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in (one, two))  # type: ignore[return-value]


def test_workers_tell_each_other_where_they_are_stuck() -> None:
    addresses = _two()
    ended: queue.Queue[str] = queue.Queue()
    lookouts = []
    for rank in (0, 1):
        cluster = Cluster((("worker", 0), ("worker", 1)), addresses, rank)
        progress = WorkerProgress()
        progress.enter(f"reduce {rank + 1}")
        progress._computed = _FOR_EVER_S
        lookouts.append(Lookout(cluster, progress, 0.2, ended.put))
    try:
        for lookout in lookouts:
            lookout.start()
        with closing(socket.socket(type=socket.SOCK_DGRAM)) as stranger:
            for said in (b"", b"[]", b"{", b'{"of": "x", "rank": 1, "in": {}}'):
                stranger.sendto(said, ("127.0.0.1", int(addresses[0].rpartition(":")[2])))
        words = ended.get(timeout=120)
    finally:
        for lookout in lookouts:
            lookout.close()
    assert f"/job:worker/task:0 at {addresses[0]} waits in reduce 1 (call 1)" in words
    assert f"/job:worker/task:1 at {addresses[1]} waits in reduce 2 (call 1)" in words
    assert "HOROVOD_STALL_CHECK_TIME_SECONDS=0.2" in words
