"""Ranks that wait for each other: every rank raises, with the circle, as soon as it is proven."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import on_ranks, run_ranks

import horovod.numpy as hvd
from horovod.errors import DeadlockError

SIZE, OTHER = 3, 1
#: Nobody is late by these, and a proof needs no patience.
PROOF = {
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_DEADLOCK_CHECK_TIME_SECONDS": "0.5",
}


def _raised(follow: Callable[[], None]) -> list[str]:
    """Return the errors of the call and of the next one, in a rank."""
    texts = []
    for _ in range(2):
        try:
            follow()
        except DeadlockError as error:
            texts.append(str(error))
    return texts


def _proven(follow: Callable[[], None]) -> str:
    """The text that every rank has raised, twice."""
    results = run_ranks(SIZE, _raised, follow, env=PROOF)
    [text] = {text for texts in results for text in texts}
    assert [len(texts) for texts in results] == [2] * SIZE
    assert text.startswith("Ranks 0, 1, 2 wait for each other, and will for ever")
    return str(text)


def _place(function: Callable[[], None], text: str) -> str:
    number = next(
        i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.strip() == text and i >= function.__code__.co_firstlineno
    )  # fmt: skip
    return f"{__file__}:{number}"


def _other_order() -> None:
    first, second = ("x", "y") if hvd.rank() == OTHER else ("y", "x")
    hvd.allreduce(np.ones(3), name=first)
    hvd.allreduce(np.ones(3), name=second)


def test_two_orders() -> None:
    text = _proven(_other_order)
    place = _place(_other_order, "hvd.allreduce(np.ones(3), name=first)")
    assert re.search(rf"rank 0 \(.*\) waits in allreduce 'y' \({re.escape(place)}\), which rank 1 did not submit", text)
    assert re.search(rf"rank 1 \(.*\) waits in allreduce 'x' \({re.escape(place)}\), which ranks 0, 2 did not", text)
    assert "The circle: rank 0 -> rank 1 -> rank 0." in text
    assert text.count("this rank has submitted that one once, and 1 operation in all") == SIZE
    assert "in one order on all ranks" in text


def _only_on_rank_0() -> None:
    for _ in range(3):
        hvd.allreduce(np.ones(3), name="gradient")
    if hvd.rank() == 0:
        hvd.barrier()
    hvd.allreduce(np.ones(3), name="gradient")


def test_a_call_on_one_rank_only() -> None:
    text = _proven(_only_on_rank_0)
    assert f"has ever called barrier (unnamed) ({_place(_only_on_rank_0, 'hvd.barrier()')})" in text
    assert "was done 3 times" in text
    assert "in one order" not in text


def _skipped_step() -> None:
    for epoch in range(2):
        for batch in range(4):
            if (epoch, batch, hvd.rank()) == (1, 2, OTHER):
                continue
            hvd.allreduce(np.ones(3), name="gradient")
        hvd.allreduce(np.ones(3), name="loss")


def test_a_skipped_step() -> None:
    text = _proven(_skipped_step)
    assert re.search(r"All ranks have done allreduce 'gradient' \(.*\) 7 times, allreduce 'loss' \(.*\) once", text)
    assert "hvd.join()" in text
    assert "in one order" not in text


def _joined() -> None:
    if hvd.rank() == 2:
        hvd.join()
    hvd.allgather(np.ones(3), name="x" if hvd.rank() else "y")


def test_a_rank_that_has_joined_waits_with_them() -> None:
    text = _proven(_joined)
    assert "waits in join 'join'" in text


def _in_another_process_set() -> None:
    pair = hvd.add_process_set([1, 2])
    if hvd.rank() == OTHER:
        hvd.allreduce(np.ones(3), name="inner", process_set=pair)
    hvd.allreduce(np.ones(3), name="outer")


def test_a_rank_that_waits_in_another_process_set() -> None:
    text = _proven(_in_another_process_set)
    assert re.search(r"rank 1 \(pid .*\) waits in allreduce 'inner' \(.*\) of process set 1, which rank 2 did", text)


def _other_order_of_optimizers() -> None:
    import torch

    import horovod.torch as hvd

    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in layers]
    if hvd.rank() == OTHER:
        optimizers.reverse()
    sum(layer(torch.ones(1, 2)).sum() for layer in layers).backward()
    optimizers[0].step()
    optimizers[1].step()


def test_optimizers_that_step_in_two_orders() -> None:
    results = run_ranks(SIZE, _once, _other_order_of_optimizers, env=PROOF)
    [text] = set(results)
    first, second = "DistributedOptimizer.gradients.survey", "DistributedOptimizer.gradients#2.survey"
    place = _place(_other_order_of_optimizers, "optimizers[0].step()")
    assert f"waits in DistributedOptimizer before its first step: allgather '{first}' ({place}), which rank 1" in text
    assert f"waits in DistributedOptimizer#2 before its first step: allgather '{second}' ({place}), which" in text
    assert "in one order on all ranks; the steps of several optimizers count, too" in text
    assert "optimizers[0].step()" in text


def _once(follow: Callable[[], None]) -> str:
    with pytest.raises(DeadlockError) as caught:
        follow()
    return str(caught.value)


@on_ranks(SIZE, env=PROOF, returns=[SIZE] * SIZE)
def test_no_proof_while_another_thread_may_come() -> int:
    mine, others = ("y", "x") if hvd.rank() else ("x", "y")

    def other() -> None:
        time.sleep(1.5)
        hvd.allreduce(np.ones(3), name=others)

    thread = threading.Thread(target=other)
    thread.start()
    hvd.allreduce(np.ones(3), name=mine)
    thread.join()
    return hvd.size()
