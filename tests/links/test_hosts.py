"""Ranks of several hosts, as processes that take themselves for it: what holds on one host holds over several."""

from __future__ import annotations

import contextlib
import os
import socket

import numpy as np
import pytest
from harness import on_ranks, run_ranks

import horovod.numpy as hvd


def _count_messages(rounds: int) -> tuple[int, int]:
    from horovod.links.hosts import channel, frames, link

    sent: list[type] = []

    class Counting(channel.RemoteDecider):
        def _send(self) -> None:
            sent.extend(map(type, self._batch))
            super()._send()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "RemoteDecider", Counting)
        patch.setattr(channel, "_KEPT_S", 3600.0)  # however late a rank is on a busy machine
        hvd.init()
        for _ in range(rounds):
            handles = [hvd.allreduce_async(np.full(3, n + hvd.rank()), name=str(n), op=hvd.Sum) for n in range(10)]
            assert [hvd.synchronize(handle)[0] for handle in handles] == [4 * n + 6 for n in range(10)]
        hvd.shutdown()
    return sent.count(frames.Submit), sent.count(frames.SubmitGroups)


def test_repeated_submissions_of_a_host_go_to_rank_0_as_groups() -> None:
    """One round of ten for two ranks goes one by one; each of the rest in one message, or in as many as came apart."""
    counts = run_ranks(4, _count_messages, 12, hosts=(2, 2), init=False)
    assert counts[:2] == [(0, 0), (0, 0)]  # rank 0's host sends nothing
    assert counts[3] == (0, 0)
    singles, groups = counts[2]
    assert singles == 10 * 2
    assert 1 <= groups <= 11 * 10


@on_ranks(4, hosts=(2, 2))
def test_a_mismatch_names_the_lines_of_all_ranks_on_every_rank() -> None:
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(np.ones(3 + (hvd.rank() == 2)), name="x")
    assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="afterwards").tolist() == [4.0, 4.0]
    text = str(caught.value)
    assert hvd.allgather_object(text) == [text] * 4
    assert all(f"rank {rank}: [{3 + (rank == 2)}]" in text for rank in range(4))
    assert text.count("test_hosts.py:") == 4


@pytest.mark.parametrize("hosts", [(2, 2), (1, 1, 2)], ids=["2+2", "1+1+2"])
@on_ranks(4, given=["hosts"])
def test_process_sets_within_and_across_hosts_and_uneven_ends() -> None:
    rank = hvd.rank()
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [0, 3], [1, 2, 3])]
    found = []
    for _ in range(3):
        for one in sets:
            if one.included():
                found.append(float(hvd.allreduce(np.full(2, float(rank)), op=hvd.Sum, process_set=one)[0]))
    hvd.remove_process_set(sets[2])
    # Each rank has more to do than the one before it.
    for step in range(rank + 1):
        found.append(float(hvd.allreduce(np.ones(2), op=hvd.Sum, name=f"step {step}")[0]))
    assert hvd.join() == 3
    of_sets = [[1.0, 3.0], [1.0, 6.0], [5.0, 6.0], [5.0, 3.0, 6.0]][rank]
    assert found == of_sets * 3 + [4.0, 3.0, 2.0, 1.0][: rank + 1]


@on_ranks(
    4,
    returns=[[place] * 3 for place in [(0, 0, 3, 0, 2), (1, 1, 3, 0, 1), (2, 2, 3, 0, 1), (3, 0, 1, 1, 2)]],
    hosts=(3, 1),
    init=False,
)
def test_init_again_after_shutdown() -> list[tuple[int, int, int, int, int]]:
    places = []
    for _ in range(3):
        hvd.init()
        hvd.allreduce(np.ones(1), name="x")
        places.append((hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()))
        hvd.shutdown()
    return places


@on_ranks(6, returns=[(0, 3), None, (1, 3), (2, 3), None, None], hosts=(1, 2, 3), init=False)
def test_a_part_of_a_job_knows_how_many_uneven_hosts_it_has() -> tuple[int, int] | None:
    ranks = [0, 2, 3]
    if int(os.environ["HOROVOD_RANK"]) not in ranks:
        return None
    hvd.init(comm=ranks)
    return hvd.cross_rank(), hvd.cross_size()


@pytest.mark.parametrize(("hosts", "is_even"), [((1, 2, 3), False), ((2, 2, 2), True)], ids=["1+2+3", "2+2+2"])
@on_ranks(6, given=["hosts"])
def test_all_ranks_tell_whether_hosts_have_as_many_ranks(is_even: bool) -> None:
    """The second host of 1+2+3 has two ranks, and three hosts have a first rank: as many as in 2+2+2."""
    assert hvd.is_homogeneous() is is_even


@pytest.mark.parametrize("hosts", [(2, 2), (1, 1, 2)], ids=["2+2", "1+1+2"])
@on_ranks(4, env={"HOROVOD_DEADLOCK_CHECK_TIME_SECONDS": "1"}, given=["hosts"])
def test_a_deadlock_between_hosts_is_proven_with_stacks_of_both() -> None:
    others = {1: "first", 2: "second"}
    for _ in range(3):  # from then on hosts submit these by number, and keep what not all of their ranks have submitted
        for name in others.values():
            hvd.allreduce(np.ones(1), name=name)
    if hvd.rank() in others:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(np.ones(1), name=others[hvd.rank()])
    else:
        handles = [hvd.allreduce_async(np.ones(1), name=name) for name in others.values()]
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.synchronize(handles[hvd.rank() == 3])
    text = str(caught.value)
    assert "rank 1 " in text, text
    assert "rank 2 " in text
    assert text.count("its main thread:") >= 2


def _is_connected(stranger: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return bool(stranger.getpeername())
    return False


@on_ranks(3, hosts=(2, 1))
def test_no_stranger_gets_to_the_port_at_which_data_moves() -> None:
    from horovod.transports.socket_filter import listening

    found = []
    for members in ([0, 2], [1, 2]):
        hvd.add_process_set(members)
        hvd.allreduce(np.ones(1000), name="x")
        for fd in listening().values() if hvd.rank() == 2 else ():  # with nothing of the control between hosts
            with socket.socket(fileno=os.dup(fd)) as port, socket.socket(port.family) as stranger:
                stranger.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    stranger.connect(port.getsockname())
                found.append(_is_connected(stranger))
    hvd.barrier()
    assert bool(found) == (hvd.rank() == 2)
    assert not any(found)
