"""A rank or a whole host comes to grief: every rank of every other host raises an error that names it."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import LIMIT_S, Ranks, on_ranks, run_ranks

import horovod.numpy as hvd
from horovod import context
from horovod.errors import InitError, PeerLostError
from horovod.links.hosts import link as hosts_link
from horovod.links.hosts.peers import HostsPeers
from horovod.links.shm import link
from horovod.transports.groups import failed
from horovod.transports.hierarchical.allreduce import _Pipeline

HOSTS = (2, 2)


def _is_signalled(victim: int, number: int) -> None:
    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() == victim:
        os.kill(os.getpid(), number)
    hvd.allreduce(np.ones(3), name="never")


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4), ids=["the hub", "beside the hub", "a leader", "beside a leader"])
def test_a_killed_rank_is_named_on_all_hosts(victim: int) -> None:
    ranks = Ranks(4, _is_signalled, (victim, signal.SIGKILL), hosts=HOSTS)
    pid = ranks.processes[victim].pid
    outcomes = ranks.outcomes()
    assert outcomes[victim].exitcode == -signal.SIGKILL, "the fault did not fire"
    for outcome in outcomes:
        if outcome.rank != victim:
            assert isinstance(outcome.error, PeerLostError), outcome.text
            assert outcome.error.rank == victim
            assert f"rank {victim} (pid {pid}" in str(outcome.error)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2], ids=["the hub", "a leader"])
def test_a_leader_that_is_stopped_is_given_up_and_finds_out_when_it_goes_on(victim: int) -> None:
    ranks = Ranks(4, _is_signalled, (victim, signal.SIGSTOP), env={"HOROVOD_HOST_TIMEOUT": "3"}, hosts=HOSTS)
    pid = ranks.pid(victim)
    for rank, process in enumerate(ranks.processes):
        if rank != victim:
            process.join(LIMIT_S)
    os.kill(pid, signal.SIGCONT)
    for outcome in ranks.outcomes():
        text = str(outcome.error)
        assert isinstance(outcome.error, PeerLostError), outcome.text
        assert outcome.error.rank == victim
        assert f"rank {victim} (pid {pid} on host-{'ab'[victim // 2]})" in text
        if outcome.rank == victim:
            assert "was stopped, or cut off, for so long that the other ranks have given it up" in text
        else:
            assert "stopped" in text and "HOROVOD_HOST_TIMEOUT=3" in text


def _leaves_first(first: tuple[int, ...]) -> str:
    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() in first:
        hvd.shutdown()
        return ""
    with pytest.raises(PeerLostError) as caught:
        hvd.allreduce(np.ones(3), name="never")
    return str(caught.value)


@pytest.mark.parametrize("first", [(0,), (2,), (0, 2), (3,)], ids=["the hub", "a leader", "both leaders", "another"])
def test_a_rank_that_is_through_with_its_data_has_left_and_is_no_lost_host(first: tuple[int, ...]) -> None:
    for rank, text in enumerate(run_ranks(4, _leaves_first, first, hosts=HOSTS)):
        if rank not in first:
            assert any(f"rank {leaver} (pid " in text for leaver in first)
            assert "has left the job: it called hvd.shutdown()" in text
            assert "call hvd.join() after the loop" in text


def _engine_has_failed() -> None:
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    watch = context.engine().link.watch
    assert watch is not None
    raise failed(RuntimeError("connection closed by peer"), "gloo", [1], watch)


def test_a_rank_that_leaves_in_an_operation_is_the_reason_for_the_failure_of_the_engine_between_hosts() -> None:
    error = Ranks(2, _engine_has_failed, hosts=(1, 1)).outcomes()[0].error
    assert isinstance(error, PeerLostError)
    assert error.rank == 1
    assert "has left the job: it called hvd.shutdown()" in str(error)


def _await(folder: Path, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len(list(folder.iterdir())) < count and time.monotonic() < deadline:
        time.sleep(0.01)


@on_ranks(4, hosts=HOSTS)
def test_a_leader_that_leaves_ends_no_wait_in_an_operation_that_it_has_completed(tmp_path: Path) -> None:
    advance, gone, leave = _Pipeline.advance, HostsPeers.gone, HostsPeers.leave

    def advance_late(self: _Pipeline, number: int) -> None:
        advance(self, number)
        if number:  # the other host has the data of this one
            _await(tmp_path, 1)

    def look(self: HostsPeers) -> int | None:
        lost = gone(self)
        if lost == 2:
            (tmp_path / "looked").touch()
        return lost

    def leave_late(self: HostsPeers, culprit: int) -> None:
        leave(self, culprit)
        deadline = time.monotonic() + LIMIT_S
        while not self.has_failed(3) and time.monotonic() < deadline:
            time.sleep(0.01)  # rank 3, which waits for its leader in vain: rank 1 is told

    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 0:
            patch.setattr(_Pipeline, "advance", advance_late)
        elif hvd.rank() == 1:
            patch.setattr(HostsPeers, "gone", look)
        elif hvd.rank() == 2:
            patch.setattr(HostsPeers, "leave", leave_late)
        text = _leaves_first((2,))
    assert not text or ("rank 2 (pid " in text and "has left the job" in text)


@on_ranks(4, hosts=HOSTS)
def test_ranks_whose_leader_has_left_are_out_of_reach(tmp_path: Path) -> None:
    members = hvd.add_process_set([0, 3])
    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() == 0:
        with pytest.raises(PeerLostError) as caught:
            hvd.allreduce(np.ones(3), name="never", process_set=members)
        (tmp_path / "told").touch()
        text = str(caught.value)
        assert "rank 3 (pid " in text and "is out of reach: rank 2 (pid " in text, text
        assert "the first rank of its host, has left the job" in text
    if hvd.rank() == 3:
        _await(tmp_path, 1)  # rank 0 must not see that rank 3 leaves itself


@on_ranks(4, hosts=HOSTS, returns=[[4.0, 3.0, 2.0, 1.0][:count] for count in (1, 3, 2, 4)])
def test_a_leader_that_joins_serves_its_host_as_before() -> list[float]:
    steps = [1, 3, 2, 4][hvd.rank()]
    sums = [float(hvd.allreduce(np.ones(3), op=hvd.Sum, name=f"step {step}")[0]) for step in range(steps)]
    assert hvd.join() == 3
    return sums


@on_ranks(4, hosts=HOSTS, init=False, returns=[4.0] * 4)
def test_hosts_meet_after_a_meeting_to_which_one_rank_did_not_come(tmp_path: Path) -> float:
    rank, said = os.environ["HOROVOD_RANK"], ""
    if rank != "3":
        os.environ["HOROVOD_START_TIMEOUT"] = "1"
        with pytest.raises(InitError) as caught:
            hvd.init()
        said = str(caught.value)
        (tmp_path / rank).touch()
    if rank == "0":
        assert "ranks 2, 3" in said and "HOROVOD_START_TIMEOUT" in said
    if rank == "2":
        assert "on host host-b, by local rank: rank 1 did not call init() within 1 s" in said
        assert "During handling" not in "".join(traceback.format_exception(caught.value))
    _await(tmp_path, 3)
    os.environ["HOROVOD_START_TIMEOUT"] = str(LIMIT_S)
    hvd.init()
    return float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


# With any interface, rank 0 waits for what the second host says in its store.
@on_ranks(2, hosts=(1, 1), init=False, env={"HOROVOD_GLOO_IFACE": "lo"})
def test_who_looks_for_the_store_of_a_rank_0_that_has_left_is_told(tmp_path: Path) -> None:
    if os.environ["HOROVOD_RANK"] == "0":
        hvd.init()
        hvd.shutdown()
        (tmp_path / "left").touch()
        return

    class LateStore(hosts_link.JobStore):
        def __init__(self, *args: Any, **named: Any) -> None:
            _await(tmp_path, 1)
            super().__init__(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts_link, "JobStore", LateStore)
        with pytest.raises(PeerLostError) as caught:
            hvd.init()
            hvd.allreduce(np.ones(3), name="never")
    text = str(caught.value)
    assert "rank 0 (pid " in text and "has left the job: it called hvd.shutdown()" in text


@pytest.mark.parametrize(("hosts", "victim"), [(HOSTS, 0), (HOSTS, 2), (HOSTS, 3), ((), 0), ((), 3)])
@on_ranks(4, init=False, given=["hosts"])
def test_nobody_waits_for_a_rank_whose_init_fails_after_all_have_met(victim: int, tmp_path: Path) -> None:
    rank = int(os.environ["HOROVOD_RANK"])

    def fail(*args: Any) -> None:
        raise InitError("there is no engine here")

    if rank == victim:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InitError):
            for module in (hosts_link, link):
                patch.setattr(module, "make_transport", fail)
            hvd.init()
        _await(tmp_path, 3)  # it lives on
        return
    with pytest.raises(PeerLostError) as caught:
        hvd.init()
        hvd.allreduce(np.ones(3), name="never")
    (tmp_path / str(rank)).touch()
    text = str(caught.value)
    assert f"rank {victim} (pid " in text and "failed: there is no engine here" in text
