"""One rank of a job whose memory is measured: trains a few steps and says what it holds."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from horovod.bench.events import LineReporter
from horovod.bench.memory import ARMS
from horovod.bench.models import make_task
from horovod.bench.train import ddp_arm, horovod_arm, local_arm
from horovod.world import detect

__all__ = ["main"]

_STEPS = 3
_MEETING_S = 60.0


def _held_bytes() -> int:
    """This process's share of memory that no file backs: its own, and shared memory by the number of sharers."""
    held = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
            held += int(line.split()[1]) * 1024
    return held


def _meet(store: Store, name: str, size: int) -> None:
    """Wait until all ranks are here; through the store, since not every arm has another way."""
    store.add(name, 1)
    deadline = time.monotonic() + _MEETING_S
    while store.add(name, 0) < size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all {size} ranks came to {name!r} within {_MEETING_S:.0f} s")
        time.sleep(0.01)


def main(argv: list[str]) -> int:
    """Train ``argv[1]`` with arm ``argv[2]``; ``argv[0]`` is the path of a store that the ranks share."""
    path, model, arm, scale = argv
    world = detect()
    torch.set_num_threads(1)
    store = FileStore(path, world.size)
    task = make_task(model, world.rank, tiny=scale == "tiny")
    if arm == ARMS[1]:
        import horovod.torch as hvd

        hvd.init()
    elif arm == ARMS[2]:
        group = PrefixStore("gloo", store)
        dist.init_process_group(
            "gloo", store=group, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=_MEETING_S)
        )
    trained = dict(zip(ARMS, (local_arm, horovod_arm, ddp_arm), strict=True))[arm](task)
    for _ in range(_STEPS):
        trained.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    gradient_bytes = sum(parameter.grad.nbytes for parameter in task.model.parameters() if parameter.grad is not None)
    _meet(store, "trained", world.size)
    held = {"held_bytes": _held_bytes(), "gradient_bytes": gradient_bytes}
    _meet(store, "measured", world.size)
    LineReporter()({"event": "held", "held": held})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
