"""Ranks may submit in any order and from any thread; everything still meets its partner."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from harness import LIMIT_S, Ranks, on_ranks

import horovod.numpy as hvd
from horovod import context
from horovod.bindings.collectives import Collectives
from horovod.errors import PeerLostError
from horovod.transports.shm import control
from horovod.transports.shm.transport import ShmTransport


@pytest.mark.parametrize(("ranks", "hosts"), [(2, ()), (5, ()), (4, (2, 2)), (4, (3, 1)), (4, (1, 1, 2))], ids=str)
@on_ranks(given=["hosts"])
def test_named_operations_in_another_order_on_every_rank(count: int = 12) -> None:
    rank, size = hvd.rank(), hvd.size()
    rng = random.Random(rank)
    for elements in (1, 1, 1, 1, 40_000, 40_000, 40_000):  # they ride along, and are staged
        numbers = list(range(count))
        rng.shuffle(numbers)
        handles = {n: hvd.allreduce_async(np.full(elements, n + rank), name=str(n), op=hvd.Sum) for n in numbers}
        rng.shuffle(numbers)
        for n in numbers:
            got, want = hvd.synchronize(handles[n]), n * size + size * (size - 1) // 2
            wrong = np.flatnonzero(got != want)
            assert not wrong.size, (elements, n, want, wrong.size, wrong[:3], got[wrong[:3]])


@on_ranks(3)
def test_one_name_may_serve_one_operation_of_each_kind() -> None:
    rank, size = hvd.rank(), hvd.size()
    work = {
        "reduce": lambda: hvd.allreduce_async(np.full(4, float(rank)), name="x", op=hvd.Sum),
        "gather": lambda: hvd.allgather_async(np.full(rank, rank), name="x"),
        "cast": lambda: hvd.broadcast_async(np.full(2, rank), root_rank=1, name="x"),
        "all": lambda: hvd.alltoall_async(np.arange(size) + rank, name="x"),
        "scatter": lambda: hvd.reducescatter_async(np.full(size, rank), op=hvd.Sum, name="x"),
        "group": lambda: hvd.grouped_allreduce_async([np.full(1, rank), np.full(2, rank)], op=hvd.Sum, name="g"),
    }
    order = list(work)
    random.Random(rank).shuffle(order)
    handles = {name: work[name]() for name in order}
    total = size * (size - 1) // 2
    assert hvd.synchronize(handles["reduce"]).tolist() == [total] * 4
    assert hvd.synchronize(handles["gather"]).tolist() == [r for r in range(size) for _ in range(r)]
    assert hvd.synchronize(handles["cast"]).tolist() == [1, 1]
    assert hvd.synchronize(handles["all"])[0].tolist() == [rank + r for r in range(size)]
    assert hvd.synchronize(handles["scatter"]).tolist() == [total]
    assert [array.tolist() for array in hvd.synchronize(handles["group"])] == [[total], [total] * 2]


@on_ranks(2)
def test_a_rank_that_runs_thousands_of_operations_ahead(count: int = 3_000) -> None:
    """More than the rings in the control page can hold; also more signatures than are remembered."""
    if hvd.rank() == 0:
        hvd.allreduce(np.zeros(1), name="start")
    handles = [hvd.allreduce_async(np.full(1, i), name=f"a long name of tensor {i}", op=hvd.Sum) for i in range(count)]
    if hvd.rank() != 0:
        hvd.allreduce(np.zeros(1), name="start")
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle).tolist() == [i * hvd.size()]


def _leaves_in_a_hurry() -> bool:
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.allreduce(np.ones(1), name="never")
    members = context.engine().link.generation.members
    os.kill(members[0].pid, signal.SIGSTOP)
    for i in range(5_000):
        hvd.allreduce_async(np.ones(1), name=f"tensor {i} of many")
    hvd.shutdown()
    return True


def test_a_rank_that_leaves_while_its_words_do_not_fit_into_the_ring() -> None:
    """Rank 0 is stopped meanwhile; what rank 1 says last never reaches it."""
    ranks = Ranks(2, _leaves_in_a_hurry)
    ranks.processes[1].join(LIMIT_S)
    os.kill(ranks.pid(0), signal.SIGCONT)
    waiting, hasty = ranks.outcomes()
    assert hasty.value is True
    assert isinstance(waiting.error, PeerLostError), waiting.text
    assert "rank 1 (pid" in str(waiting.error)
    assert "has left the job: it " in str(waiting.error)


def _leaves_in_the_middle() -> bool:
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.allreduce(np.ones(1_000_000), name="big")
    members = context.engine().link.generation.members
    other = os.pidfd_open(members[0].pid)
    os.kill(members[0].pid, signal.SIGSTOP)
    hvd.allreduce_async(np.ones(1_000_000), name="big")
    hvd.shutdown()
    os.kill(members[0].pid, signal.SIGCONT)
    # This process lives on for longer than rank 0 does.
    poll = select.poll()
    poll.register(other, select.POLLIN)
    return bool(poll.poll(LIMIT_S / 2 * 1000))


def test_a_rank_that_leaves_with_work_in_flight_and_lives_on() -> None:
    waiting, leaver = Ranks(2, _leaves_in_the_middle).outcomes()
    assert leaver.value is True, leaver.text
    assert isinstance(waiting.error, PeerLostError), waiting.text
    assert "rank 1 (pid" in str(waiting.error)


@on_ranks(3, init=False, fresh=True)
def test_the_others_go_on_for_long_when_a_rank_has_left() -> None:
    """The log fills its ring several times, and the rank that has left reads none of it."""
    control.LOG_RING_BYTES = 16 << 10
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    array = np.ones(1)
    for _ in range(5_000 if hvd.rank() < 2 else 0):
        hvd.allreduce_(array, name="x", op=hvd.Max, process_set=pair)


@pytest.mark.parametrize("ranks", [2, 5])
@on_ranks()
def test_two_libraries_meet_and_are_fused_with_each_other() -> None:
    import torch

    from horovod.torch.adapter import TorchAdapter

    other = Collectives(TorchAdapter())
    rank, size = hvd.rank(), hvd.size()
    for turn in range(10):
        handles: list[tuple[Any, int]] = []
        for i in range(4):
            if (i + rank + turn) % 2:
                handles.append((hvd, hvd.allreduce_async(np.full(40_000, float(rank + i)), name=str(i), op=hvd.Sum)))
            else:
                tensor = torch.full((40_000,), float(rank + i), dtype=torch.float64)
                handles.append((other, other.allreduce_async(tensor, name=str(i), op=hvd.Sum)))
        for i, (library, handle) in enumerate(handles):
            result = library.synchronize(handle)
            assert result.min() == result.max() == sum(r + i for r in range(size))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks()
def test_two_threads_submit_and_wait_at_once_on_every_rank(count: int = 2, rounds: int = 200) -> None:
    rank, size = hvd.rank(), hvd.size()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(rank * 100 + number)
        try:
            for i in range(rounds):
                array = np.full(8 if i % 10 else 30_000, float(rank + i + number))
                if rng.random() < 0.5:
                    result = hvd.allreduce(array, name=f"{number}.{i}", op=hvd.Sum)
                else:
                    handle = hvd.allreduce_async(array, name=f"{number}.{i}", op=hvd.Sum)
                    while rng.random() < 0.5 and not hvd.poll(handle):
                        pass
                    result = hvd.synchronize(handle)
                assert (result == sum(r + i + number for r in range(size))).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@on_ranks(2)
def test_an_operation_completes_though_nobody_synchronizes_it() -> None:
    arrays = [np.full(1000, float(hvd.rank())) for _ in range(50)]
    for i, array in enumerate(arrays):
        hvd.allreduce_async_(array, name=str(i), op=hvd.Sum)
    hvd.barrier()
    hvd.allreduce(np.zeros(1), name="last")
    assert all((array == 1).all() for array in arrays)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks()
def test_operations_advance_while_the_caller_computes() -> None:
    handle = hvd.allreduce_async(np.ones(50_000), name="x", op=hvd.Sum)
    deadline = time.monotonic() + LIMIT_S / 2
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.001)  # the caller computes
    assert hvd.poll(handle)


@on_ranks(2, returns=[[2, 2, 2]] * 2)
def test_a_submission_that_failed_is_as_if_it_had_not_been() -> list[float]:
    real = ShmTransport.offer

    def offer(transport: ShmTransport, work: Any, inline: Any) -> int:
        ShmTransport.offer = real  # type: ignore[method-assign]
        raise MemoryError("no room for a copy")

    if hvd.rank() == 0:
        for name in (None, "x"):
            ShmTransport.offer = offer  # type: ignore[method-assign]
            with pytest.raises(MemoryError, match="no room"):
                hvd.allreduce(np.zeros(3), name=name)
    results = [hvd.allreduce(np.ones(3), op=hvd.Sum, name=name) for name in (None, "x", None)]
    return [float(result[0]) for result in results]
