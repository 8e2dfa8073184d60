"""A fork is a snapshot: child and rank do not see each other's writes, and no thread of the rank loses one."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from typing import Any

import numpy as np
from forking import in_child
from harness import on_ranks
from later import later

from horovod.transports.shm.arena import INLINE_BYTES, STAGING_BYTES, Arena
from horovod.transports.shm.control import Control
from horovod.transports.shm.mapping import create_memfd

hvd, torch = later("horovod.torch"), later("torch")

PAGE = 4096
BYTES = INLINE_BYTES + STAGING_BYTES + 16 * PAGE
Array = np.ndarray[Any, Any]
_FORKS = 10


def _arena() -> Arena:
    fd = create_memfd("horovod-test", BYTES)
    arena = Arena(fd, BYTES)
    os.close(fd)
    return arena


def test_a_child_that_frees_a_block_leaves_the_parents_alone() -> None:
    arena = _arena()
    kept = [np.frombuffer(arena.allocate(PAGE), dtype=np.uint8)]
    kept[0][:] = 7

    def free() -> bool:
        kept.clear()
        gc.collect()
        return True

    assert in_child(free)
    assert kept[0].sum() == 7 * PAGE
    with np.testing.assert_raises(MemoryError):
        arena.allocate(16 * PAGE)
    kept.clear()
    arena.allocate(16 * PAGE)
    arena.close()


def test_a_child_reads_what_was_there_and_writes_to_a_copy() -> None:
    arena = _arena()
    block = np.frombuffer(arena.allocate(2 * PAGE), dtype=np.uint8)
    block[:] = 7

    def write() -> bool:
        assert block.sum() == 2 * 7 * PAGE
        block[:PAGE] = 9
        # A child of the child has what the child had.
        return in_child(lambda: int(block.sum()) == (7 + 9) * PAGE)

    assert in_child(write)
    assert block.sum() == 2 * 7 * PAGE
    arena.close()


def test_a_child_has_no_part_in_the_control_page() -> None:
    fd = create_memfd("horovod-test", Control.nbytes(2))
    page, other = Control(fd, 0, 2, cores=2), Control(fd, 1, 2, cores=2)
    os.close(fd)

    def post() -> bool:
        page.post(7, ())
        page.ring(1)
        return True

    assert in_child(post)
    assert other.words64[other.flag[0]] == 0
    page.post(5, ())
    assert other.words64[other.flag[0]] == 5
    page.close()
    other.close()


def _ends(how: str) -> None:
    if how == "exit":
        raise SystemExit(3)
    if how == "error":
        raise RuntimeError("the child's own")


@on_ranks(2)
def test_children_of_a_training_rank_change_nothing_in_it(steps: int = 3) -> None:
    """Gradients, tensors and forked children that copy, free and end as children do."""
    model = torch.nn.Linear(64, 8, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    own = hvd.zeros(1000)
    found: list[float] = []
    for step in range(steps):
        own.fill_(step + 1.0)
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.synchronize()

        def child(how: str = ("exit", "error", "")[step % 3]) -> bool:
            nonlocal own
            try:
                model.weight.grad.zero_()
                optimizer.zero_grad(set_to_none=True)
                del own
                model.weight.grad = None
                gc.collect()
                _ends(how)
            except (SystemExit, RuntimeError):
                hvd.shutdown()
                gc.collect()
            return True

        assert in_child(child)
        found.append(float(model.weight.grad.sum()))
        found.append(float(hvd.allreduce(own, op=hvd.Sum, name="own")[-1]))
        with optimizer.skip_synchronize():
            optimizer.step()
    assert found == [1024.0, 2.0, 1024.0, 4.0, 1024.0, 6.0]


@on_ranks(2, fresh=True, returns=[([2.0] * 16, sum(range(64)))] * 2)
def test_the_workers_of_a_loader_change_nothing_in_the_rank() -> tuple[list[float], float]:
    """An ordinary loader whose workers inherit the optimizer, collect what they find, and write to what they have."""
    from torch.utils.data import DataLoader, Dataset

    table = hvd.zeros(64)
    table += torch.arange(64.0)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), op=hvd.Sum)

    class Rows(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> torch.Tensor:
            row = table[index : index + 1].clone()
            table.zero_()
            optimizer.zero_grad(set_to_none=False)
            gc.collect()
            return row

    gradients = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for batch in DataLoader(Rows(), batch_size=1, num_workers=2, multiprocessing_context="fork"):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            assert batch.shape == (1, 1)
            optimizer.step()
            gradients.append(float(model.weight.grad))
    return gradients, float(table.sum())


def _wrong_elements_after_a_fork() -> int:
    import horovod.numpy as hvd

    result: np.ndarray[Any, Any] = hvd.allgather(np.zeros(4 << 20, np.float32), name="result")
    begun, stop, added = threading.Event(), threading.Event(), 0

    def write() -> None:
        nonlocal added
        # numpy gives the interpreter away for this, so that it goes on while the other thread forks.
        while not stop.is_set():
            np.add(result, 1, out=result)
            added += 1
            begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        begun.wait()
        assert in_child(lambda: True)
    finally:
        stop.set()
        writer.join()
    return int(np.count_nonzero(result != added))


@on_ranks(2, returns=[[0] * _FORKS] * 2)
def test_a_fork_loses_no_writes_of_another_thread() -> list[int]:
    return [_wrong_elements_after_a_fork() for _ in range(_FORKS)]


def _forked_before(change: Any, look: Any) -> bool:
    """Fork; let the rank go on with ``change``, and then the child with ``look``."""
    told, tell = os.pipe()

    def child() -> bool:
        assert os.read(told, 1) == b"x"
        return bool(look())

    def parent() -> None:
        change()
        os.write(tell, b"x")

    try:
        return in_child(child, parent)
    finally:
        os.close(told)
        os.close(tell)


@on_ranks(2, returns=[[True, True]] * 2)
def test_a_child_keeps_what_was_there_while_the_rank_trains() -> list[bool]:
    model = torch.nn.Linear(64, 8, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    own = hvd.zeros(100_000)
    own.fill_(1.0)
    big = torch.full((300_000,), 1.0)
    result = hvd.allgather(big, name="result")

    def step(value: float) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 64), value)).sum().backward()
        optimizer.synchronize()

    step(1.0)
    step(1.0)

    def go_on() -> None:
        nonlocal result
        step(3.0)
        own.fill_(3.0)
        hvd.allreduce_(own, op=hvd.Sum, name="own")
        result.fill_(3.0)

    def look() -> bool:
        # By numpy: the threads of torch are not in the child.
        tensors = [model.weight.grad.numpy(), own.numpy(), result.numpy()]
        return [float(tensor.max()) for tensor in tensors] == [2.0, 1.0, 1.0]

    found = [_forked_before(go_on, look)]
    found.append([float(t.min()) for t in (model.weight.grad, own, result)] == [6.0, 6.0, 3.0])
    return found
