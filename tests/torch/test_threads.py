"""Torch may have been left with more threads than a rank has cores; collectives must not join that fight."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from commands import run
from harness import on_ranks

MANY = 4 * (os.cpu_count() or 1)
ELEMENTS = 1 << 20


def _native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@on_ranks(2, fresh=True)
def test_collectives_start_no_threads_beyond_a_ranks_share() -> None:
    import torch

    import horovod.torch as hvd

    torch.set_num_threads(1)
    small, large, half = torch.ones(ELEMENTS), torch.ones(8 * ELEMENTS), torch.ones(ELEMENTS, dtype=torch.bfloat16)
    in_arena = hvd.zeros(4 * ELEMENTS)
    torch.set_num_threads(MANY)
    before = _native_threads()
    for tensor in (small, large, half, in_arena):
        hvd.allreduce_(tensor)
        hvd.broadcast_(tensor, 0)
        hvd.allgather(tensor)
        hvd.alltoall(tensor)
        hvd.reducescatter(tensor)
    hvd.grouped_allreduce_([small, large])
    during = _native_threads()
    large.add_(1)
    # Those that torch starts by itself show that more threads would have been seen.
    assert (during - before, _native_threads() - during, torch.get_num_threads()) == (0, MANY - 1, MANY)


@on_ranks(2, fresh=True)
def test_the_background_thread_works_alone_while_the_caller_computes() -> None:
    """An allreduce starts no thread in the background, and one that somebody waits for does."""
    import torch

    import horovod.torch as hvd
    from horovod import context

    context.engine().transport.control.share = 2
    torch.set_num_threads(1)
    tensor, before = torch.ones(16 * ELEMENTS), _native_threads()
    torch.set_num_threads(2)
    handle = hvd.allreduce_async_(tensor)
    deadline = time.monotonic() + 60
    while hvd.stats().in_flight and time.monotonic() < deadline:
        time.sleep(0.001)
    after = _native_threads()
    hvd.synchronize(handle)
    hvd.allreduce_(tensor)
    assert (after - before, _native_threads() - after) == (0, 1)


SCRIPT = """
import torch
import horovod.torch as hvd
hvd.init()
torch.set_num_threads({threads})
hvd.allreduce_(torch.ones(1 << 20))
hvd.allreduce_(torch.ones(1 << 20))
"""


def test_whoever_left_torch_too_many_threads_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(threads=MANY))
    command = ["horovodrun", "-np", "2", "env", "-u", "OMP_NUM_THREADS", sys.executable, str(script)]
    code, output = run(command, tmp_path)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if "WARNING" in line]
    assert f"torch uses {MANY} threads in each of 2 ranks, which have" in line
    assert "If the script calls torch.set_num_threads, let it choose " in line
    assert "else set OMP_NUM_THREADS=" in line


def test_who_keeps_to_the_share_is_told_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(threads=1))
    code, output = run(["horovodrun", "-np", "2", sys.executable, str(script)], tmp_path)
    assert code == 0, output
    assert "WARNING" not in output
